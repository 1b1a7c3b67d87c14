// What a warp does together, and bfloat16 as bits: the only part that is PTX. tests/emulated.h has the same for a CPU.

__device__ inline float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline u32 pack(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ inline u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8
__device__ inline void load_matrices(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address(row)));
}

__device__ inline void load_transposed(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address(row)));
}

// d += a b: a is 16x16 by rows, b 16x8 by columns
__device__ inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float from_lane_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// past the first cache, which may hold what another block has changed since
__device__ inline float fresh(const float* p) { return __ldcg(p); }

// one more of `ticket`, after all that this block has written so far; what other blocks wrote before theirs can be read
__device__ inline u32 take(u32* ticket) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
}
