// Copies whole pages inside the arena, in order, all layers and heads.
//
// One block per (layer, head). A thread takes the same sixteen bytes of every page, so that copies
// that build on each other stay in order without a barrier. Reads and writes one page of one head
// per block and copy.

struct CopyParams {
    u8* arena;
    const uint2* copies;  // source, target
    u64 head_bytes;       // of all slots of one head
    u32 page_bytes;       // of one head's page
    u32 n_copies;
};
static_assert(sizeof(CopyParams) == COPY_PARAMS_SIZE, "the host's CopyParams differs");

extern "C" __global__ void copy_pages(CopyParams p) {
    begin();
    u8* head = p.arena + blockIdx.x * p.head_bytes;
    for (u32 i = 0; i < p.n_copies; i++) {
        const uint2 copy = p.copies[i];
        const uint4* source = (const uint4*)(head + (u64)copy.x * p.page_bytes);
        uint4* target = (uint4*)(head + (u64)copy.y * p.page_bytes);
        for (u32 j = threadIdx.x; j < p.page_bytes / 16; j += blockDim.x) target[j] = source[j];
    }
}
