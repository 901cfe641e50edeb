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

// Pages, or some heads of them, from pinned memory of the host to their slots: a block takes a head of a
// page, then another one.

struct LandParams {
    u8* device;        // [head][slot][page], from the first head on
    const u8* host;    // [page][stride]
    const u32* slots;  // [n_pages], in pinned memory too
    u64 stride;
    u32 n_device;      // slots of the device
    u32 page_bytes;    // of one head's page
    u32 n_heads;
    u32 n_pages;
};
static_assert(sizeof(LandParams) == LAND_PARAMS_SIZE, "the host's LandParams differs");

extern "C" __global__ void land_pages(LandParams p) {
    begin();
    for (u32 i = blockIdx.x; i < p.n_heads * p.n_pages; i += gridDim.x) {
        const u32 page = i / p.n_heads, head = i % p.n_heads;
        const uint4* source = (const uint4*)(p.host + page * p.stride + (u64)head * p.page_bytes);
        u8* target = p.device + ((u64)head * p.n_device + p.slots[page]) * p.page_bytes;
        for (u32 j = threadIdx.x; j < p.page_bytes / 16; j += blockDim.x)
            ((uint4*)target)[j] = source[j];
    }
}
