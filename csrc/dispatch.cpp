#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tierstream {
namespace {

std::vector<const Kernels*> runnable_best_first() {
    std::vector<const Kernels*> tables;
#if defined(TIERSTREAM_X86_64)
    // These checks include the operating system's: registers that it does not save do not count.
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("sse4.2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) tables.push_back(&kernels_avx512);
    if (avx2) tables.push_back(&kernels_avx2);
#endif
    tables.push_back(&kernels_scalar);
    return tables;
}

const Kernels& choose() {
    const auto tables = runnable_best_first();
    const char* wanted = std::getenv("TIERSTREAM_ISA");
    if (wanted == nullptr || *wanted == '\0') return *tables.front();
    std::string offered;
    for (const Kernels* table : tables) {
        if (std::string_view(wanted) == table->isa) return *table;
        offered += (offered.empty() ? "" : ", ") + std::string(table->isa);
    }
    throw std::invalid_argument("environment variable TIERSTREAM_ISA is '" + std::string(wanted) +
                                "', but this CPU runs only: " + offered + "; unset it or set one of these");
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace tierstream
