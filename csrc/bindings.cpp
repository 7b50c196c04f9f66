// tierstream._native: checks the arguments, lets go of the GIL, calls the kernels. Signatures and docstrings
// for the reader and the type checker are in package/tierstream/_native.pyi.

#include <nanobind/nanobind.h>

#include <cmath>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "array_argument.h"
#include "dispatch.h"
#include "gil.h"
#include "operations.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierstream {
namespace {

ArrayArgument writes_fp32(nb::handle object, const char* name) {
    return {object.ptr(), name, {Element::fp32}, Access::write};
}

ArrayArgument writes_uint16(nb::handle object, const char* name) {
    return {object.ptr(), name, {Element::uint16}, Access::write};
}

ArrayArgument reads_gradient(nb::handle object) {
    return {object.ptr(), "grad", {Element::fp32, Element::uint16}, Access::read};
}

Gradient as_gradient(const ArrayArgument& array) {
    if (array.element() == Element::fp32) return {.fp32 = array.fp32()};
    return {.bf16 = array.uint16()};
}

unsigned check_threads(std::int64_t threads) {
    constexpr std::int64_t most = 1024;
    if (threads < 1 || threads > most) {
        throw nb::value_error(
            ("threads: " + std::to_string(threads) + " is not between 1 and " + std::to_string(most))
                .c_str());
    }
    return static_cast<unsigned>(threads);
}

void require(bool holds, const char* name, double value, const char* rule) {
    if (holds) return;
    throw nb::value_error((std::string(name) + ": " + std::to_string(value) + " is not " + rule).c_str());
}

void check(const AdamwHyperparameters& hyper) {
    const auto fraction = [](double x) { return x >= 0 && x < 1; };
    const auto not_negative = [](double x) { return std::isfinite(x) && x >= 0; };
    require(hyper.step >= 1, "step", static_cast<double>(hyper.step), "at least 1");
    require(not_negative(hyper.lr), "lr", hyper.lr, "finite and at least 0");
    require(fraction(hyper.beta1), "beta1", hyper.beta1, "at least 0 and below 1");
    require(fraction(hyper.beta2), "beta2", hyper.beta2, "at least 0 and below 1");
    require(not_negative(hyper.eps), "eps", hyper.eps, "finite and at least 0");
    require(not_negative(hyper.weight_decay), "weight_decay", hyper.weight_decay, "finite and at least 0");
    require(std::isfinite(static_cast<float>(hyper.grad_scale)), "grad_scale", hyper.grad_scale,
            "finite in fp32");
}

void adamw_split(nb::handle weight, nb::handle low, nb::handle exp_avg, nb::handle exp_avg_sq,
                 nb::handle grad, std::int64_t step, double lr, double beta1, double beta2, double eps,
                 double weight_decay, double grad_scale, std::int64_t threads) {
    const AdamwHyperparameters hyper{step, lr, beta1, beta2, eps, weight_decay, grad_scale};
    check(hyper);
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument w = writes_uint16(weight, "weight"), l = writes_uint16(low, "low");
    const ArrayArgument m = writes_fp32(exp_avg, "exp_avg"), v = writes_fp32(exp_avg_sq, "exp_avg_sq");
    const ArrayArgument g = reads_gradient(grad);
    check_together({&w, &l, &m, &v, &g});
    const GilReleased unlocked;
    adamw({.weight = w.uint16(),
           .low = l.uint16(),
           .exp_avg = m.fp32(),
           .exp_avg_sq = v.fp32(),
           .grad = as_gradient(g)},
          hyper, w.count(), thread_count);
}

void adamw_fp32(nb::handle master, nb::handle weight, nb::handle exp_avg, nb::handle exp_avg_sq,
                nb::handle grad, std::int64_t step, double lr, double beta1, double beta2, double eps,
                double weight_decay, double grad_scale, std::int64_t threads) {
    const AdamwHyperparameters hyper{step, lr, beta1, beta2, eps, weight_decay, grad_scale};
    check(hyper);
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument x = writes_fp32(master, "master");
    std::optional<ArrayArgument> w;
    if (!weight.is_none())
        w.emplace(weight.ptr(), "weight", std::initializer_list{Element::uint16}, Access::write);
    const ArrayArgument m = writes_fp32(exp_avg, "exp_avg"), v = writes_fp32(exp_avg_sq, "exp_avg_sq");
    const ArrayArgument g = reads_gradient(grad);
    if (w) {
        check_together({&x, &*w, &m, &v, &g});
    } else {
        check_together({&x, &m, &v, &g});
    }
    const GilReleased unlocked;
    adamw({.master = x.fp32(),
           .weight = w ? w->uint16() : nullptr,
           .exp_avg = m.fp32(),
           .exp_avg_sq = v.fp32(),
           .grad = as_gradient(g)},
          hyper, x.count(), thread_count);
}

// In the order of the parameters of engine/device/kernels.cu.
nb::tuple adamw_scalars(std::int64_t step, double lr, double beta1, double beta2, double eps,
                        double weight_decay, double grad_scale) {
    const AdamwHyperparameters hyper{step, lr, beta1, beta2, eps, weight_decay, grad_scale};
    check(hyper);
    const AdamwScalars s = make_adamw_scalars(hyper);
    return nb::make_tuple(s.grad_scale, s.decay, s.lerp_coefficient, s.lerp_from_grad ? 1.0f : 0.0f, s.beta2,
                          s.one_minus_beta2, s.bias_correction2_sqrt, s.eps, s.negative_step_size);
}

void split_master(nb::handle master, nb::handle weight, nb::handle low) {
    const ArrayArgument x(master.ptr(), "master", {Element::fp32}, Access::read);
    const ArrayArgument w = writes_uint16(weight, "weight"), l = writes_uint16(low, "low");
    check_together({&x, &w, &l});
    const GilReleased unlocked;
    kernels().split_master(x.fp32(), w.uint16(), l.uint16(), 0, x.count());
}

void join_master(nb::handle weight, nb::handle low, nb::handle master) {
    const ArrayArgument w(weight.ptr(), "weight", {Element::uint16}, Access::read);
    const ArrayArgument l(low.ptr(), "low", {Element::uint16}, Access::read);
    const ArrayArgument x = writes_fp32(master, "master");
    check_together({&w, &l, &x});
    const GilReleased unlocked;
    kernels().join_master(w.uint16(), l.uint16(), x.fp32(), 0, x.count());
}

void round_bf16(nb::handle source, nb::handle target) {
    const ArrayArgument s(source.ptr(), "src", {Element::fp32}, Access::read);
    const ArrayArgument t = writes_uint16(target, "dst");
    check_together({&s, &t});
    const GilReleased unlocked;
    kernels().round_bf16(s.fp32(), t.uint16(), 0, s.count());
}

double sum_squares_of(nb::handle grad, std::int64_t threads) {
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument g = reads_gradient(grad);
    const GilReleased unlocked;
    return sum_squares(as_gradient(g), g.count(), thread_count);
}

std::uint32_t memory_read_of(nb::handle source, std::int64_t threads) {
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument s(source.ptr(), "src", {Element::fp32}, Access::read);
    const GilReleased unlocked;
    return memory_read(s.fp32(), s.count(), thread_count);
}

void memory_copy_of(nb::handle source, nb::handle target, std::int64_t threads) {
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument s(source.ptr(), "src", {Element::fp32}, Access::read);
    const ArrayArgument t = writes_fp32(target, "dst");
    check_together({&s, &t});
    const GilReleased unlocked;
    memory_copy(s.fp32(), t.fp32(), s.count(), thread_count);
}

Elements as_elements(const ArrayArgument& array) {
    if (array.element() == Element::fp32) return {.fp32 = array.fp32()};
    return {.uint16 = array.uint16()};
}

void memory_update_of(nb::sequence targets, nb::handle source, std::int64_t threads) {
    const unsigned thread_count = check_threads(threads);
    const ArrayArgument s(source.ptr(), "src", {Element::fp32, Element::uint16}, Access::read);
    std::deque<ArrayArgument> held;  // which moves none of them
    std::vector<const ArrayArgument*> all{&s};
    std::vector<Elements> elements;
    for (const nb::handle target : targets) {
        held.emplace_back(target.ptr(), "dst", std::initializer_list{Element::fp32, Element::uint16},
                          Access::write);
        all.push_back(&held.back());
        elements.push_back(as_elements(held.back()));
    }
    check_together(all);
    const GilReleased unlocked;
    memory_update({elements.data(), elements.size(), as_elements(s)}, s.count(), thread_count);
}

std::uint32_t crc32c(nb::handle buffer, std::uint32_t seed) {
    const ArrayArgument b(buffer.ptr(), "buffer", {Element::uint8}, Access::read);
    const GilReleased unlocked;
    return kernels().crc32c(b.begin(), b.count(), seed);
}

}  // namespace
}  // namespace tierstream

// None is let through to ArrayArgument, whose message names the argument.
static auto array(const char* name) { return nb::arg(name).none(); }

NB_MODULE(_native, m) {
    using namespace tierstream;
    m.def("cpu_isa", [] { return kernels().isa; });
    m.def("adamw_split", &adamw_split, array("weight"), array("low"), array("exp_avg"), array("exp_avg_sq"),
          array("grad"), nb::kw_only(), "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a,
          "grad_scale"_a, "threads"_a);
    m.def("adamw_fp32", &adamw_fp32, array("master"), array("weight"), array("exp_avg"), array("exp_avg_sq"),
          array("grad"), nb::kw_only(), "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a,
          "grad_scale"_a, "threads"_a);
    m.def("adamw_scalars", &adamw_scalars, nb::kw_only(), "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a,
          "weight_decay"_a, "grad_scale"_a);
    m.def("split_master", &split_master, array("master"), array("weight"), array("low"));
    m.def("join_master", &join_master, array("weight"), array("low"), array("master"));
    m.def("round_bf16", &round_bf16, array("src"), array("dst"));
    m.def("sum_squares", &sum_squares_of, array("grad"), "threads"_a);
    m.def("memory_read", &memory_read_of, array("src"), "threads"_a);
    m.def("memory_copy", &memory_copy_of, array("src"), array("dst"), "threads"_a);
    m.def("memory_update", &memory_update_of, "dst"_a, array("src"), "threads"_a);
    m.def("crc32c", &crc32c, array("buffer"), "seed"_a = 0);
}
