// CRC-32C by tables, eight bytes at a time ("slicing by 8", Kounavis and Berry, ISCC 2005).

#include <bit>
#include <cstring>

#include "crc32c.h"

namespace tierstream {
namespace {

static_assert(std::endian::native == std::endian::little, "the checksum reads words in memory order");

constexpr std::uint32_t polynomial = 0x82f63b78;

// slices[k][b]: the register after byte b followed by k zero bytes.
constexpr auto slices = [] {
    std::array<std::array<std::uint32_t, 256>, 8> table{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
        table[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t b = 0; b < 256; ++b)
            table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 0xff];
    }
    return table;
}();

std::uint32_t load_u32(const std::uint8_t* p) {
    std::uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

}  // namespace

std::uint32_t crc32c_portable(const std::uint8_t* data, std::size_t nbytes, std::uint32_t seed) noexcept {
    std::uint32_t crc = ~seed;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        const std::uint32_t a = load_u32(data) ^ crc, b = load_u32(data + 4);
        crc = slices[7][a & 0xff] ^ slices[6][a >> 8 & 0xff] ^ slices[5][a >> 16 & 0xff] ^
              slices[4][a >> 24] ^ slices[3][b & 0xff] ^ slices[2][b >> 8 & 0xff] ^
              slices[1][b >> 16 & 0xff] ^ slices[0][b >> 24];
    }
    for (; nbytes > 0; ++data, --nbytes) crc = crc >> 8 ^ slices[0][(crc ^ *data) & 0xff];
    return ~crc;
}

CrcMap crc32c_zero_bytes_map(std::size_t nbytes) noexcept {
    // The register is linear over GF(2), so a map is the images of the 256 values of each byte, and passing n
    // more zero bytes is applying the map of n zero bytes to the entries.
    CrcMap map{};
    for (std::size_t k = 0; k < 4; ++k) map[k] = slices[3 - k];  // four zero bytes
    for (std::size_t done = 4; done < nbytes; ++done) {
        for (auto& table : map) {
            for (auto& entry : table) entry = entry >> 8 ^ slices[0][entry & 0xff];
        }
    }
    return map;
}

}  // namespace tierstream
