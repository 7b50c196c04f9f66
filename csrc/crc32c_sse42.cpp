// CRC-32C by the crc32 instruction: it takes three cycles and one can start every cycle, so three stripes run
// at once and are then joined.

#include <nmmintrin.h>

#include <cstring>

#include "crc32c.h"

namespace tierstream {
namespace {

constexpr std::size_t stripe_bytes = 2048;

std::uint64_t load_u64(const std::uint8_t* p) {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

std::uint32_t apply(const CrcMap& map, std::uint32_t x) {
    return map[0][x & 0xff] ^ map[1][x >> 8 & 0xff] ^ map[2][x >> 16 & 0xff] ^ map[3][x >> 24];
}

}  // namespace

std::uint32_t crc32c_sse42(const std::uint8_t* data, std::size_t nbytes, std::uint32_t seed) noexcept {
    static const CrcMap past_stripe = crc32c_zero_bytes_map(stripe_bytes);
    std::uint64_t crc = static_cast<std::uint32_t>(~seed);
    for (; nbytes >= 3 * stripe_bytes; data += 3 * stripe_bytes, nbytes -= 3 * stripe_bytes) {
        std::uint64_t second = 0, third = 0;
        for (std::size_t i = 0; i < stripe_bytes; i += 8) {
            crc = _mm_crc32_u64(crc, load_u64(data + i));
            second = _mm_crc32_u64(second, load_u64(data + stripe_bytes + i));
            third = _mm_crc32_u64(third, load_u64(data + 2 * stripe_bytes + i));
        }
        const std::uint32_t first_two =
            apply(past_stripe, static_cast<std::uint32_t>(crc)) ^ static_cast<std::uint32_t>(second);
        crc = apply(past_stripe, first_two) ^ static_cast<std::uint32_t>(third);
    }
    for (; nbytes >= 8; data += 8, nbytes -= 8) crc = _mm_crc32_u64(crc, load_u64(data));
    for (; nbytes > 0; ++data, --nbytes) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *data);
    return ~static_cast<std::uint32_t>(crc);
}

}  // namespace tierstream
