// CRC-32C (Castagnoli, RFC 3720 section 12.1): reflected polynomial 0x82f63b78, initial value and final xor
// 0xffffffff.
//
// `seed` is the checksum of what came before: crc32c(b, crc32c(a, 0)) is the checksum of a followed by b.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tierstream {

std::uint32_t crc32c_portable(const std::uint8_t* data, std::size_t nbytes, std::uint32_t seed) noexcept;
#if defined(TIERSTREAM_X86_64)
std::uint32_t crc32c_sse42(const std::uint8_t* data, std::size_t nbytes, std::uint32_t seed) noexcept;
#endif

// A linear map of the 32-bit CRC register, as the images of the 256 values of each of its four bytes.
using CrcMap = std::array<std::array<std::uint32_t, 256>, 4>;

// The map that takes a CRC register past `nbytes` zero bytes; nbytes >= 4.
CrcMap crc32c_zero_bytes_map(std::size_t nbytes) noexcept;

}  // namespace tierstream
