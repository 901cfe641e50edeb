// out[i] = x[output_rows[i]]: the rows that logits are wanted for.
//
// x [T, d]; out [outputs, d]. One block per output row; reads and writes 4 d bytes each.

struct GatherParams {
    const float* x;
    const u32* output_rows;
    float* out;
    u32 d;
    u32 padding;
};
static_assert(sizeof(GatherParams) == GATHER_PARAMS_SIZE, "the host's GatherParams differs");

extern "C" __global__ void gather_rows(GatherParams p) {
    begin();
    const u64 source = (u64)p.output_rows[blockIdx.x] * p.d;
    const u64 target = (u64)blockIdx.x * p.d;
    for (u32 i = threadIdx.x; i < p.d; i += blockDim.x) p.out[target + i] = p.x[source + i];
}
