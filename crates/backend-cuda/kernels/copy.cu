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

// Pages of some heads that lie in memory of the host, to the frames on the device that they have: a block
// takes FILL_PAGES pages of a head, then others. All of their pieces are asked for before the first is
// stored, because the link is far.

#define FILL_THREADS 512
#define FILL_PAGES 8

struct FillParams {
    u8* near;           // [head][frame][page]
    const u8* far;      // [head][slot][page]
    const uint2* list;  // slot and frame of each page
    u64 near_head_bytes;
    u64 far_head_bytes;
    u32 n_pages;
    u32 page_bytes;     // of one head's page
    u32 n_heads;
    u32 padding;
};
static_assert(sizeof(FillParams) == FILL_PARAMS_SIZE, "the host's FillParams differs");

extern "C" __global__ void __launch_bounds__(FILL_THREADS) fill_frames(FillParams p) {
    begin();
    const u32 runs = (p.n_pages + FILL_PAGES - 1) / FILL_PAGES;
    for (u32 i = blockIdx.x; i < runs * p.n_heads; i += gridDim.x) {
        const u32 head = i / runs, first = i % runs * FILL_PAGES, n = min(p.n_pages - first, FILL_PAGES);
        const u8* far = p.far + head * p.far_head_bytes;
        u8* near = p.near + head * p.near_head_bytes;
        uint2 pages[FILL_PAGES];
        UNROLL for (u32 k = 0; k < FILL_PAGES; k++) pages[k] = p.list[first + min(k, n - 1)];
        for (u32 j = threadIdx.x; j < p.page_bytes / 16; j += FILL_THREADS) {
            uint4 pieces[FILL_PAGES];
            UNROLL for (u32 k = 0; k < FILL_PAGES; k++)
                if (k < n) pieces[k] = ((const uint4*)(far + (u64)pages[k].x * p.page_bytes))[j];
            UNROLL for (u32 k = 0; k < FILL_PAGES; k++)
                if (k < n) ((uint4*)(near + (u64)pages[k].y * p.page_bytes))[j] = pieces[k];
        }
    }
}
