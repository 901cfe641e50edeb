// What the kernels of top-k attention share: rows that decide, and what is remembered of a head.
//
// A head's *working set* is a run of pages, like those of the arena or with rows in eight bits (sparse_set.cuh);
// row `i` of the set is token i % 16 of its page i / 16. Rows of a set have no order, and there are no holes.
//
//   sees   [ 0 .. n_first )   [ working set ]   [ cut .. kv_len )
//   from   the arena          its own pages     the arena

// A row of the batch that sees what is picked for its heads.
struct SparseRow {
    u32 row;        // of the batch
    u32 kv_len;
    u32 table_row;
    u32 state_row;  // where its states are
    uint2* marks;   // [head of the model][mark_stride]: when a place was last chosen, and its row
    u8* pages;      // of working sets
};
static_assert(sizeof(SparseRow) == SPARSE_ROW_SIZE, "the host's SparseRow differs");

// What is remembered of one head of one sequence, and what was last decided about it.
struct HeadState {
    u32 has_label;
    u32 cut;        // where the tail begins
    u32 made_at;    // length of the sequence when the selection was made
    u32 now;        // selections so far
    u32 n_members;  // rows of the working set
    u32 n_first;
    u32 first;      // where its working set begins: so many SET_UNITs behind the row's pages
    u32 n_pages;    // room for it
    // The last decision.
    u32 lookup;     // LOOKUP_*
    float similarity;
    u32 n_chosen;   // rows of the selection, 0 if none was made
    u32 n_moved;    // rows that count as moved
    u32 n_moves;    // rows that are to be brought
    u32 n_gone;     // rows that went: the first moves take their places, the others those behind the last
    // What the step saw, if the selection was made after it (LOOKUP_LATE).
    u32 seen_members;
    u32 seen_cut;
};
static_assert(sizeof(HeadState) == HEAD_STATE_SIZE, "the host's HeadState differs");

#define ALL_ENDED 0x10000u  // what blocks that decide count to, however many they are

#define LOOKUP_NOTHING 0  // nothing to choose from
#define LOOKUP_FIRST 1
#define LOOKUP_HIT 2
#define LOOKUP_TURNED 3
#define LOOKUP_TURNED_FAR 4  // by a right angle or more
#define LOOKUP_AGED 5
#define LOOKUP_ALWAYS 6
#define LOOKUP_LATE 7  // turned, but what there is serves once more, and the next one is made

// Rows and states of one layer.
struct SparseHeads {
    const SparseRow* rows;
    HeadState* states;  // [state row][state_stride], from the layer's first head on
    u32 state_stride;
    u32 n_rows;
    u32 n_kv_heads;
    u32 group;
};

DEVICE HeadState* state_of(const SparseHeads& heads, const SparseRow& row, u32 head) {
    return heads.states + (u64)row.state_row * heads.state_stride + head;
}

// Where keys and values of one layer are.
struct SparsePages {
    const u8* layer;    // [G][slot][page]
    const u32* tables;  // [row][table_len]
    u64 head_bytes;
    Near near;
    u32 table_len;
    u32 padding;
};

DEVICE const u8* page_of(const SparsePages& p, u32 head, u32 table_row, u32 page) {
    const u32 slot = p.tables[(u64)table_row * p.table_len + page];
    return page_in(p.layer, p.head_bytes, p.near, head, slot);
}
