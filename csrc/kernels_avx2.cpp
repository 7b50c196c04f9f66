// The kernels for AVX2 and FMA.

#include "crc32c.h"
#include "kernels_impl.h"
#include "simd_avx2.h"

namespace tierstream {

constinit const Kernels kernels_avx2 = make_kernels<Avx2>("avx2", crc32c_sse42);

}  // namespace tierstream
