// Copies whole pages inside a tier and between tiers, in order, all layers and heads.
//
// Slots of the device come first, then those of the host, whose pinned memory the device sees at
// the same addresses. One block per (layer, head). A thread takes the same sixteen bytes of every page, so that copies
// that build on each other stay in order without a barrier. Reads and writes one page of one head
// per block and copy.

struct CopyParams {
    u8* device;           // [head][slot][page]
    u8* host;             // the same, or null
    const uint2* copies;  // source, target
    u32 n_device;         // slots of the device
    u32 n_host;           // slots of the host
    u32 page_bytes;       // of one head's page
    u32 n_copies;
};
static_assert(sizeof(CopyParams) == COPY_PARAMS_SIZE, "the host's CopyParams differs");

DEVICE uint4* page_of(const CopyParams& p, u32 slot) {
    const u64 head = blockIdx.x;
    if (slot < p.n_device)
        return (uint4*)(p.device + (head * p.n_device + slot) * p.page_bytes);
    return (uint4*)(p.host + (head * p.n_host + slot - p.n_device) * p.page_bytes);
}

extern "C" __global__ void copy_pages(CopyParams p) {
    begin();
    for (u32 i = 0; i < p.n_copies; i++) {
        const uint2 copy = p.copies[i];
        const uint4* source = page_of(p, copy.x);
        uint4* target = page_of(p, copy.y);
        for (u32 j = threadIdx.x; j < p.page_bytes / 16; j += blockDim.x) target[j] = source[j];
    }
}
