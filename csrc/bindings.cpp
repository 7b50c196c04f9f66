#include <nanobind/nanobind.h>
NB_MODULE(_native, m) { m.def("cpu_isa", [] { return "scalar"; }); }
