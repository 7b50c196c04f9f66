// The kernels on whole arrays, cut into blocks that the thread pool runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace tierstream {

struct AdamwHyperparameters {
    std::int64_t step;  // of this update, from 1
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;  // every gradient is multiplied by this first, in fp32
};

// What torch computes in Python floats is computed in double here, and rounded to fp32 where torch's
// operators round it.
AdamwScalars make_adamw_scalars(const AdamwHyperparameters& hyper);

void adamw(const AdamwArrays& arrays, const AdamwHyperparameters& hyper, std::size_t count, unsigned threads);

// The sum of squares in fp64. The blocks are fixed and added in order: the same bits for any number of
// threads.
double sum_squares(const Gradient& grad, std::size_t count, unsigned threads);

// Yardsticks of memory bandwidth: the sum of 32-bit elements modulo 2^32, memcpy, and every target replaced
// by source - target modulo its width.
std::uint32_t memory_read(const float* source, std::size_t count, unsigned threads);
void memory_copy(const float* source, float* target, std::size_t count, unsigned threads);
void memory_update(const MemoryStreams& streams, std::size_t count, unsigned threads);

}  // namespace tierstream
