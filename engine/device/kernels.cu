// The optimizer's arithmetic on a GPU: AdamW and the sum of squares, as the CPU's kernels do them.
//
// Compiled at run time for the GPU that is there (engine/device/kernels.py). AdamW is the sequence of IEEE
// operations of csrc/kernels_impl.h, which is to be read first; every operation is written as an intrinsic
// that rounds to nearest and is never contracted, so both give the same bits, subnormals included (the
// payload of a NaN excepted). A test compiles this file for the CPU and compares.

typedef unsigned int u32;
typedef unsigned short u16;

struct Scalars {
    float grad_scale, decay, lerp_coefficient;
    bool lerp_from_grad;
    float beta2, one_minus_beta2, bias_correction2_sqrt, eps, negative_step_size;
};

struct Fp32Gradient {
    const float* values;
    __device__ float load(int i) const { return values[i]; }
};

struct Bf16Gradient {
    const u16* values;
    __device__ float load(int i) const { return __uint_as_float(u32(values[i]) << 16); }
};

__device__ u16 quiet_nan_half(u32 x) { return u16((x >> 16) | 0x0040); }

// The bf16 nearest to x, ties away from zero, and the lower half of x.
struct SplitMaster {
    u16* weight;
    u16* low;
    __device__ float load(int i) const {
        const u32 carry = (u32(low[i]) & 0x8000u) << 1;
        return __uint_as_float(((u32(weight[i]) << 16) | u32(low[i])) - carry);
    }
    __device__ void store(int i, float master) const {
        const u32 x = __float_as_uint(master);
        const bool nan = master != master;
        weight[i] = nan ? quiet_nan_half(x) : u16((x + 0x8000u) >> 16);
        low[i] = nan ? u16(0) : u16(x & 0xffffu);
    }
};

// fp32, with a bf16 copy, ties to even.
struct Fp32MasterAndWeight {
    float* master;
    u16* weight;
    __device__ float load(int i) const { return master[i]; }
    __device__ void store(int i, float value) const {
        const u32 x = __float_as_uint(value);
        master[i] = value;
        weight[i] = value != value ? quiet_nan_half(x) : u16((x + ((x >> 16) & 1u) + 0x7fffu) >> 16);
    }
};

struct Fp32Master {
    float* master;
    __device__ float load(int i) const { return master[i]; }
    __device__ void store(int i, float value) const { master[i] = value; }
};

template <class Master, class Grad>
__device__ void adamw_element(const Master& master, float* exp_avg, float* exp_avg_sq, const Grad& gradient,
                              const Scalars& s, int i) {
    const float grad = __fmul_rn(gradient.load(i), s.grad_scale);
    const float decayed = __fmul_rn(master.load(i), s.decay);
    const float old_avg = exp_avg[i];
    const float avg =
        __fmaf_rn(s.lerp_coefficient, __fsub_rn(grad, old_avg), s.lerp_from_grad ? grad : old_avg);
    exp_avg[i] = avg;
    const float scaled_sq = __fmul_rn(exp_avg_sq[i], s.beta2);
    const float avg_sq = __fmaf_rn(__fmul_rn(s.one_minus_beta2, grad), grad, scaled_sq);
    exp_avg_sq[i] = avg_sq;
    const float denom = __fadd_rn(__fdiv_rn(__fsqrt_rn(avg_sq), s.bias_correction2_sqrt), s.eps);
    const float update = __fdiv_rn(__fmul_rn(s.negative_step_size, avg), denom);
    master.store(i, __fadd_rn(decayed, update));
}

template <class Master, class Grad>
__device__ void adamw(const Master& master, float* exp_avg, float* exp_avg_sq, const Grad& gradient, int count,
                      const Scalars& s) {
    const long long step = gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        adamw_element(master, exp_avg, exp_avg_sq, gradient, s, int(i));
    }
}

// Whoever launches these has Python's floats: the scalars come as fp64, and are fp32 numbers.
#define SCALARS                                                                                              \
    double grad_scale, double decay, double lerp_coefficient, double lerp_from_grad, double beta2,           \
        double one_minus_beta2, double bias_correction2_sqrt, double eps, double negative_step_size
#define AS_SCALARS                                                                                           \
    Scalars {                                                                                                \
        float(grad_scale), float(decay), float(lerp_coefficient), lerp_from_grad != 0, float(beta2),         \
            float(one_minus_beta2), float(bias_correction2_sqrt), float(eps), float(negative_step_size)      \
    }

#define ADAMW_KERNELS(suffix, Grad, Element)                                                                 \
    extern "C" __global__ void adamw_split_##suffix(u16* weight, u16* low, float* exp_avg, float* exp_avg_sq, \
                                                    const Element* grad, int count, SCALARS) {               \
        adamw(SplitMaster{weight, low}, exp_avg, exp_avg_sq, Grad{grad}, count, AS_SCALARS);                 \
    }                                                                                                        \
    extern "C" __global__ void adamw_master_##suffix(float* master, u16* weight, float* exp_avg,             \
                                                     float* exp_avg_sq, const Element* grad, int count,      \
                                                     SCALARS) {                                              \
        adamw(Fp32MasterAndWeight{master, weight}, exp_avg, exp_avg_sq, Grad{grad}, count, AS_SCALARS);      \
    }                                                                                                        \
    extern "C" __global__ void adamw_fp32_##suffix(float* master, float* exp_avg, float* exp_avg_sq,         \
                                                   const Element* grad, int count, SCALARS) {                \
        adamw(Fp32Master{master}, exp_avg, exp_avg_sq, Grad{grad}, count, AS_SCALARS);                       \
    }

ADAMW_KERNELS(grad_fp32, Fp32Gradient, float)
ADAMW_KERNELS(grad_bf16, Bf16Gradient, u16)

// Each block writes one fp64 partial sum. The square of an fp32 number is exact in fp64; which thread adds
// what, and the tree over a block's threads, depend on the shape of the launch alone.
extern "C" __global__ void sum_squares(const float* values, int count, double* partials) {
    __shared__ double sums[SUM_THREADS];
    double sum = 0;
    for (long long i = blockIdx.x * SUM_THREADS + threadIdx.x; i < count; i += gridDim.x * SUM_THREADS) {
        const double x = values[i];
        sum += x * x;
    }
    sums[threadIdx.x] = sum;
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) partials[blockIdx.x] = sums[0];
}
