// The kernels for AVX-512 F, BW, DQ, VL.

#include "crc32c.h"
#include "kernels_impl.h"
#include "simd_avx512.h"

namespace tierstream {

constinit const Kernels kernels_avx512 = make_kernels<Avx512>("avx512", crc32c_sse42);

}  // namespace tierstream
