// The kernels for any CPU.

#include "crc32c.h"
#include "kernels_impl.h"

namespace tierstream {

constinit const Kernels kernels_scalar = make_kernels<Scalar>("scalar", crc32c_portable);

}  // namespace tierstream
