// Chooses the kernels for the CPU that the process runs on.
#pragma once

#include "kernels.h"

namespace tierstream {

// The table of the best instruction set that the CPU has, or of the lower one named by the environment
// variable TIERSTREAM_ISA (scalar, avx2, avx512). Read once. Throws std::invalid_argument for a name that is
// unknown or that the CPU cannot run.
const Kernels& kernels();

}  // namespace tierstream
