#include "array_argument.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

namespace nb = nanobind;

namespace tierstream {
namespace {

struct ElementInfo {
    const char* dtype;
    char format;  // of the struct module
    Py_ssize_t nbytes;
};

ElementInfo info(Element element) {
    switch (element) {
        case Element::uint8:
            return {"uint8", 'B', 1};
        case Element::uint16:
            return {"uint16", 'H', 2};
        case Element::fp32:
            break;
    }
    return {"float32", 'f', 4};
}

bool has_format(const char* format, Py_ssize_t itemsize, const ElementInfo& wanted) {
    if (*format == '@' || *format == '=' || *format == '<') ++format;  // native order: little-endian
    return format[0] == wanted.format && format[1] == '\0' && itemsize == wanted.nbytes;
}

std::string dtypes(std::initializer_list<Element> accepted) {
    std::string names;
    for (const Element element : accepted)
        names += (names.empty() ? "" : " or ") + std::string(info(element).dtype);
    return names;
}

[[noreturn]] void type_error(const char* name, const std::string& message) {
    throw nb::type_error((std::string(name) + ": " + message).c_str());
}

[[noreturn]] void value_error(const char* name, const std::string& message) {
    throw nb::value_error((std::string(name) + ": " + message).c_str());
}

}  // namespace

ArrayArgument::ArrayArgument(PyObject* object, const char* name, std::initializer_list<Element> accepted,
                             Access access)
    : name_(name), access_(access) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_RECORDS_RO) != 0) {
        PyErr_Clear();
        type_error(name, "a one-dimensional array of " + dtypes(accepted) + " is needed, not " +
                             Py_TYPE(object)->tp_name);
    }
    try {
        check(accepted);
    } catch (...) {
        PyBuffer_Release(&view_);
        throw;
    }
}

ArrayArgument::~ArrayArgument() { PyBuffer_Release(&view_); }

void ArrayArgument::check(std::initializer_list<Element> accepted) {
    const char* format = view_.format == nullptr ? "B" : view_.format;
    const auto* match = std::find_if(accepted.begin(), accepted.end(), [&](Element element) {
        return has_format(format, view_.itemsize, info(element));
    });
    if (match == accepted.end()) {
        type_error(name_, "the dtype must be " + dtypes(accepted) + ", not buffer format '" + format + "'");
    }
    element_ = *match;
    if (view_.ndim != 1) value_error(name_, "one dimension is needed, not " + std::to_string(view_.ndim));
    count_ = static_cast<std::size_t>(view_.shape[0]);
    if (count_ > 1 && view_.strides[0] != view_.itemsize) {
        value_error(name_,
                    "must be contiguous, but its stride is " + std::to_string(view_.strides[0]) + " bytes");
    }
    if (reinterpret_cast<std::uintptr_t>(view_.buf) % static_cast<std::uintptr_t>(view_.itemsize) != 0) {
        value_error(name_, "the address must be a multiple of " + std::to_string(view_.itemsize) + " bytes");
    }
    if (access_ == Access::write && view_.readonly != 0)
        value_error(name_, "is written to, but is read-only");
}

void check_together(const std::vector<const ArrayArgument*>& arrays) {
    const ArrayArgument& first = *arrays.front();
    for (const ArrayArgument* a : arrays) {
        if (a->count() != first.count()) {
            value_error(a->name(), std::to_string(a->count()) + " elements, but " + first.name() + " has " +
                                       std::to_string(first.count()));
        }
        for (const ArrayArgument* b : arrays) {
            const bool one_is_written = a->writable() || b->writable();
            if (a != b && one_is_written && a->begin() < b->end() && b->begin() < a->end()) {
                value_error(a->name(), "shares memory with " + std::string(b->name()));
            }
        }
    }
}

}  // namespace tierstream
