// A Python argument that must be a one-dimensional array, checked and held while the kernels run.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace tierstream {

enum class Element { uint8, uint16, fp32 };
enum class Access { read, write };

// Any object with the buffer protocol: numpy arrays, memoryviews, bytes (for reading). Construct and destroy
// with the GIL held; the memory may be used without it.
class ArrayArgument {
public:
    // Throws nanobind's type_error (no such buffer, or another dtype) or value_error (shape, strides,
    // alignment, read-only); the message starts with `name`.
    ArrayArgument(PyObject* object, const char* name, std::initializer_list<Element> accepted, Access access);
    ~ArrayArgument();
    ArrayArgument(const ArrayArgument&) = delete;
    ArrayArgument& operator=(const ArrayArgument&) = delete;

    const char* name() const { return name_; }
    Element element() const { return element_; }
    std::size_t count() const { return count_; }
    // The first byte and the one past the last.
    const std::uint8_t* begin() const { return static_cast<const std::uint8_t*>(view_.buf); }
    const std::uint8_t* end() const { return begin() + view_.len; }
    bool writable() const { return access_ == Access::write; }

    float* fp32() const { return static_cast<float*>(view_.buf); }
    std::uint16_t* uint16() const { return static_cast<std::uint16_t*>(view_.buf); }

private:
    void check(std::initializer_list<Element> accepted);

    Py_buffer view_{};
    const char* name_;
    Access access_;
    Element element_{};
    std::size_t count_ = 0;
};

// All arrays have the length of the first, and none that is written shares memory with another; else
// value_error.
void check_together(const std::vector<const ArrayArgument*>& arrays);

}  // namespace tierstream
