#include "operations.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "thread_pool.h"

namespace tierstream {
namespace {

// Elements per block: some hundred kilobytes of planes, so that handing out a block costs nothing against
// running it.
constexpr std::size_t block_elements = 32768;

std::size_t block_count(std::size_t count) { return (count + block_elements - 1) / block_elements; }

// range(begin, end, block) for every block of `count` elements.
template <class Range>
void for_each_range(std::size_t count, unsigned threads, const Range& range) {
    ThreadPool::instance().for_each_block(block_count(count), threads, [&](std::size_t block) {
        const std::size_t begin = block * block_elements;
        range(begin, std::min(begin + block_elements, count), block);
    });
}

}  // namespace

AdamwScalars make_adamw_scalars(const AdamwHyperparameters& hyper) {
    const double step = static_cast<double>(hyper.step);
    const double bias_correction1 = 1 - std::pow(hyper.beta1, step);
    const double bias_correction2 = 1 - std::pow(hyper.beta2, step);
    const float lerp_weight = static_cast<float>(1 - hyper.beta1);
    const bool lerp_from_grad = !(lerp_weight < 0.5f);
    return {
        .grad_scale = static_cast<float>(hyper.grad_scale),
        .decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay),
        .lerp_coefficient = lerp_from_grad ? lerp_weight - 1.0f : lerp_weight,
        .lerp_from_grad = lerp_from_grad,
        .beta2 = static_cast<float>(hyper.beta2),
        .one_minus_beta2 = static_cast<float>(1 - hyper.beta2),
        .bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2)),
        .eps = static_cast<float>(hyper.eps),
        .negative_step_size = static_cast<float>(-(hyper.lr / bias_correction1)),
    };
}

void adamw(const AdamwArrays& arrays, const AdamwHyperparameters& hyper, std::size_t count,
           unsigned threads) {
    const auto kernel = kernels().adamw;
    const AdamwScalars scalars = make_adamw_scalars(hyper);
    for_each_range(count, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        kernel(arrays, scalars, begin, end);
    });
}

double sum_squares(const Gradient& grad, std::size_t count, unsigned threads) {
    const auto kernel = kernels().sum_squares;
    std::vector<double> partial(block_count(count));
    for_each_range(count, threads, [&](std::size_t begin, std::size_t end, std::size_t block) {
        partial[block] = kernel(grad, begin, end);
    });
    double total = 0;
    for (const double sum : partial) total += sum;
    return total;
}

std::uint32_t memory_read(const float* source, std::size_t count, unsigned threads) {
    const auto kernel = kernels().memory_read;
    std::atomic<std::uint32_t> total{0};
    for_each_range(count, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        total.fetch_add(kernel(source, begin, end), std::memory_order_relaxed);
    });
    return total;
}

void memory_copy(const float* source, float* target, std::size_t count, unsigned threads) {
    for_each_range(count, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        std::memcpy(target + begin, source + begin, (end - begin) * sizeof(float));
    });
}

void memory_update(const MemoryStreams& streams, std::size_t count, unsigned threads) {
    const auto kernel = kernels().memory_update;
    for_each_range(count, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        kernel(streams, begin, end);
    });
}

}  // namespace tierstream
