// One instruction of the tensor cores; tests/support/gpu_on_cpu has its own, for a CPU.
//
// mma.sync.aligned.m16n8k16.row.col: of a 16x8 matrix of floats a lane has, with g = lane / 4 and
// t = lane % 4, columns 2t and 2t + 1 of rows g and g + 8. Of a 16x16 matrix a of 16-bit numbers it
// has pairs: a[g][2t], a[g + 8][2t], a[g][2t + 8], a[g + 8][2t + 8], and of a 16x8 matrix b
// b[2t][g] and b[2t + 1][g] as a pair, then the same 8 rows below. (PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type".)

struct Pairs4 {
  unsigned a[4];
};
struct Pairs2 {
  unsigned b[2];
};

__device__ void multiply_add_matrices(__half, float* c, Pairs4 a, Pairs2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "r"(b.b[0]), "r"(b.b[1]));
}

__device__ void multiply_add_matrices(__nv_bfloat16, float* c, Pairs4 a, Pairs2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "r"(b.b[0]), "r"(b.b[1]));
}
