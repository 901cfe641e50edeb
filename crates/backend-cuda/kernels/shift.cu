// Writes whole pages from others, in order, all layers and heads: values as they are, keys turned.
//
// One block per (layer, head). The two elements of a key that turn together belong to one thread, so
// that a page may be its own source. Reads and writes one page of one head per block and shift.

struct Shift {
    u32 source, target;
    u32 is_turned;  // if not, keys keep their bits
    u32 padding;
};

struct ShiftParams {
    u8* arena;            // [head][slot][page]
    const Shift* shifts;
    const float2* turns;  // [shift][rotated / 2] cosine and sine
    u64 head_bytes;       // of all slots of one head
    u32 n_shifts;
    u32 half;  // rotated / 2
    u32 is_halves;
    u32 padding;
};
static_assert(sizeof(Shift) == SHIFT_SIZE, "the host's Shift differs");
static_assert(sizeof(ShiftParams) == SHIFT_PARAMS_SIZE, "the host's ShiftParams differs");

extern "C" __global__ void shift_pages(ShiftParams p) {
    begin();
    u8* pages = p.arena + blockIdx.x * p.head_bytes;
    for (u32 n = 0; n < p.n_shifts; n++) {
        const Shift shift = p.shifts[n];
        const Element* source = (const Element*)(pages + (u64)shift.source * HEAD_PAGE_BYTES);
        Element* target = (Element*)(pages + (u64)shift.target * HEAD_PAGE_BYTES);
        for (u32 at = threadIdx.x; at < PAGE * HEAD_DIM; at += blockDim.x) {
            const u32 token = at / HEAD_DIM, i = at % HEAD_DIM;
            target[value_at(token, i)] = source[value_at(token, i)];
            if (i >= 2 * p.half) target[key_at(token, i)] = source[key_at(token, i)];
        }
        for (u32 at = threadIdx.x; at < PAGE * p.half; at += blockDim.x) {
            const u32 token = at / p.half, i = at % p.half;
            const u32 first = key_at(token, p.is_halves ? i : 2 * i);
            const u32 second = key_at(token, p.is_halves ? i + p.half : 2 * i + 1);
            Element x = source[first], y = source[second];
            if (shift.is_turned) {
                const float2 turn = p.turns[(u64)n * p.half + i];
                const float a = element_value(x), b = element_value(y);
                x = key_element(a * turn.x - b * turn.y);
                y = key_element(b * turn.x + a * turn.y);
            }
            target[first] = x;
            target[second] = y;
        }
        // The next source may be this target.
        __syncthreads();
    }
}
