// Scores of questions that the host asks: `score_pieces`, then `score_finish` unless bits were counted.
//
// Grid: (piece, question). The first reads digests (or keys) once and writes group floats a place, the
// second reads those and writes one. Reference: backend/src/topk.rs; conformance: scores_match.

struct AskedParams {
    ScoreParams score;
    const Question* asks;
};
static_assert(sizeof(Question) == QUESTION_SIZE, "the host's Question differs");
static_assert(sizeof(AskedParams) == ASKED_PARAMS_SIZE, "the host's AskedParams differs");

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2) score_pieces(AskedParams p) {
    extern __shared__ __align__(128) u32 shared_words[];
    begin();
    const Question ask = p.asks[blockIdx.y];
    if (blockIdx.x * PIECE >= ask.n) return;
    const ScoreRoom room = score_room(p.score, shared_words);
    prepare_queries(p.score, ask, room);
    score_piece(p.score, ask, room, blockIdx.x, false);
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS) score_finish(AskedParams p) {
    __shared__ float2 totals[MAX_GROUP];
    begin();
    const Question ask = p.asks[blockIdx.y];
    const u32 start = blockIdx.x * PIECE;
    if (start >= ask.n) return;
    total_sums(p.score, ask, totals);
    const float* raw = p.score.raw + (u64)ask.number * p.score.group * p.score.stride;
    for (u32 place = start + threadIdx.x; place < min(ask.n, start + PIECE); place += SCORE_THREADS)
        p.score.scores[(u64)ask.number * p.score.stride + place] =
            finish_score(p.score, totals, raw + place, p.score.stride);
}
