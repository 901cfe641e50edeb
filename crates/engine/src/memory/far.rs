//! Pages in memory of the host that a device reads over a link, and what it keeps of them itself.
//!
//! ```text
//!   host     [ pages, rows in eight bits ........ | swap space ]
//!   device   [ weights | working memory | what it decides by | digests, scales | copies | whole layers, or heads ]
//!                                        └───────────────────────── the near budget ──────────────────────────┘
//! ```

use nuthatch_types::HeadSet;

use super::{Budget, MemoryError, SizeRequest, kv_budget, pages_per_seq, working_bytes};

/// What a device may keep of pages that are far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarRequest {
    /// Bytes of the host's memory that pages and swap space may take.
    pub host_usable: u64,
    /// Bytes of the device for what it decides by, digests and copies of pages, never exceeded; without
    /// it, enough for copies of one sequence's pages beside those that are needed.
    pub near_budget: Option<u64>,
    /// Pages of each decoding sequence that should have copies.
    pub pages_per_seq: u32,
    /// Parts of a layer that can take turns to have copies of all pages of a prompt, two of them at one time.
    pub parts: u32,
    /// Whether the pages of some layers stay on the device, of as many as the budget allows; without a
    /// budget, of all if there is room for them. If rows come in eight bits, and no threads bring them, those of
    /// some heads stay instead with a budget, as long as not all pages can: they are half as large, and the heads may
    /// be of any layer.
    pub keeps_layers: bool,
    /// Bytes beside each page, over all layers, if rows come in eight bits.
    pub codes: CodeBytes,
    /// Bytes that deciding takes less if no layer stays, because rows in eight bits stay so in working sets.
    pub deciding_saved: u64,
    /// Bytes of the device for rows on their way, where threads of the host bring them; the host has as
    /// many for them.
    pub staged: u64,
}

/// Bytes beside a page over all layers, for rows in eight bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeBytes {
    /// On the host: the rows.
    pub host: u64,
    /// On the device: their scales.
    pub device: u64,
}

/// What a device keeps of pages that are far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NearSizes {
    /// Pages that have copies at one time.
    pub n_pages: u32,
    /// Bytes of the copies.
    pub copies: u64,
    /// First layers whose pages are not far.
    pub n_layers: u32,
    /// Bytes of their pages.
    pub layers: u64,
    /// Heads whose rows in eight bits are on the device.
    pub n_heads: u32,
    /// Bytes of those.
    pub heads: u64,
    /// Bytes of the digests of all pages.
    pub digests: u64,
    /// Bytes of the scales of rows in eight bits.
    pub scales: u64,
    /// Bytes for rows on their way.
    pub staged: u64,
    /// Bytes that all of it may take, together with what the device decides by.
    pub budget: u64,
}

impl NearSizes {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.copies + self.layers + self.heads + self.digests + self.scales + self.staged
    }
}

/// How many pages there may be, and what is left for copies.
pub(super) struct FarRoom {
    /// Bytes of the host for pages.
    pub(super) host_bytes: u64,
    /// Pages whose digests have room beside the least copies.
    pub(super) n_digests: u64,
    /// Bytes of the host for a page with what is beside it.
    pub(super) host_page: u64,
    near_most: u64,
    budget: u64,
    codes: CodeBytes,
    deciding_saved: u64,
    staged: u64,
    parts: u64,
    /// Pages that decoding sequences always see or write, and with them all of a step and of the longest sequence.
    decoding: u64,
    longest: u64,
    /// Copies that are needed.
    least: u64,
    keeps_layers: bool,
    has_budget: bool,
}

impl FarRoom {
    pub(super) fn new(request: &SizeRequest, far: &FarRequest) -> Result<Self, MemoryError> {
        let page = request.kv.page_bytes() as u64;
        let digest = (request.digest_page_bytes + far.codes.device).max(1);
        let host_taken = request.host_bytes.saturating_add(far.staged);
        let host_room = far.host_usable.saturating_sub(host_taken);
        let host_bytes = match request.budget {
            Budget::KvBytes(asked) | Budget::OutsideBytes(asked) if asked > host_room => {
                return Err(MemoryError::Host { asked, usable: host_room });
            }
            Budget::KvBytes(asked) | Budget::OutsideBytes(asked) => asked,
            Budget::Share(_) => host_room,
        };
        // Neither pages nor swap space are on the device.
        let budget = match request.budget {
            Budget::Share(share) => Budget::Share(share),
            Budget::KvBytes(_) | Budget::OutsideBytes(_) => Budget::Share(1.0),
        };
        let device = SizeRequest { budget, host_bytes: 0, deciding: 0, ..*request };
        let device_room = kv_budget(&device)?;
        let budget = far.near_budget.unwrap_or(device_room);
        if budget > device_room {
            return Err(MemoryError::Kv {
                kv_asked: budget,
                host_bytes: 0,
                weights: request.weights,
                working: working_bytes(request),
                deciding: 0,
                max_seqs: request.max_seqs,
                available: request.available,
            });
        }
        let max_context = request.max_context.unwrap_or(request.model_context);
        let n_least = pages_per_seq(request, request.max_context.unwrap_or(super::CONTEXT_MIN));
        let parts = u64::from(far.parts.max(1));
        // Sequences have no more pages than these, and each is copied once.
        let most = u64::from(request.max_seqs) * pages_per_seq(request, max_context);
        let decoding = (u64::from(request.max_seqs) * (u64::from(far.pages_per_seq) + 1)).min(most);
        let of_a_step = decoding + u64::from(request.max_rows / request.kv.page_len);
        let all = u64::from(request.kv.n_layers);
        let least = in_turn((of_a_step + n_least).min(most), all * parts).max(decoding);
        let copies = least * page;
        let digests = n_least * (request.digest_page_bytes + far.codes.device);
        let SizeRequest { max_seqs, .. } = *request;
        // At least: no layer stays.
        let deciding = request.deciding - far.deciding_saved;
        let staged = far.staged;
        let needed = [copies, digests, staged].into_iter().fold(deciding, u64::saturating_add);
        let Some(rest) = budget.checked_sub(needed) else {
            return Err(MemoryError::Near {
                budget,
                deciding,
                digests,
                copies,
                staged,
                max_seqs,
                max_context,
            });
        };
        Ok(FarRoom {
            host_bytes,
            n_digests: n_least + rest / digest,
            host_page: page + far.codes.host,
            near_most: budget - staged,
            budget,
            codes: far.codes,
            deciding_saved: far.deciding_saved,
            staged,
            parts,
            decoding,
            longest: (of_a_step + pages_per_seq(request, max_context)).min(most),
            least,
            keeps_layers: far.keeps_layers,
            has_budget: far.near_budget.is_some(),
        })
    }

    /// What is kept near of so many pages.
    pub(super) fn near(&self, request: &SizeRequest, n_pages: u64) -> NearSizes {
        let all = u64::from(request.kv.n_layers);
        let (layer, digests) =
            (request.kv.page_bytes() as u64 / all, n_pages * request.digest_page_bytes);
        let scales = n_pages * self.codes.device;
        let room = self.near_most.saturating_sub(digests + scales);
        // A prompt's copies come first, for parts that take turns: it is read by every chunk of it.
        let n_copies =
            |n_far: u64| in_turn(self.longest, n_far * self.parts).max(self.decoding).min(n_pages);
        let fits = |&n: &u64| {
            let pages = n_pages * layer * n + n_copies(all - n) * layer * (all - n);
            pages + self.deciding(request, n) <= room
        };
        // Threads of the host read all rows there.
        let takes_heads = self.codes.host > 0 && self.staged == 0;
        let least = if self.has_budget && !takes_heads { 0 } else { all };
        let n_layers = (least..=all).rev().filter(|_| self.keeps_layers).find(fits).unwrap_or(0);
        let room = room.saturating_sub(self.deciding(request, n_layers));
        let layers = n_pages * layer * n_layers;
        let far_bytes = layer * (all - n_layers);
        let all_heads = all * u64::from(request.kv.n_kv_heads);
        let head = n_pages * (self.codes.host / all_heads);
        let beside = room.saturating_sub(n_copies(all - n_layers) * far_bytes);
        let n_heads = match beside.checked_div(head) {
            Some(n) if takes_heads && self.keeps_layers && self.has_budget && n_layers < all => {
                n.min(all_heads).min(HeadSet::MOST.into())
            }
            _ => 0,
        };
        let heads = head * n_heads;
        let n_room = (room - layers - heads).checked_div(far_bytes).unwrap_or(0);
        let most = if self.has_budget { n_pages } else { self.longest.min(n_pages) };
        let n = n_room.max(self.least).min(most);
        let countable = |n: u64| u32::try_from(n).expect("no more than there are pages or layers");
        NearSizes {
            n_pages: countable(n),
            copies: n * far_bytes,
            n_layers: countable(n_layers),
            layers,
            n_heads: countable(n_heads),
            heads,
            digests,
            // Layers that stay have none.
            scales: scales / all * (all - n_layers),
            staged: if n_layers == all { 0 } else { self.staged },
            budget: self.budget,
        }
    }

    /// Bytes that deciding takes, if so many layers stay.
    pub(super) fn deciding(&self, request: &SizeRequest, n_layers: u64) -> u64 {
        request.deciding - if n_layers == 0 { self.deciding_saved } else { 0 }
    }

    /// Bytes of the host for so many pages, of which these layers are not there.
    pub(super) fn host_kv(&self, request: &SizeRequest, n_pages: u64, near: &NearSizes) -> u64 {
        let all = u64::from(request.kv.n_layers);
        n_pages * self.host_page / all * (all - u64::from(near.n_layers)) - near.heads + near.staged
    }
}

/// Copies of each page in all layers that are as much memory as copies of so many pages for two of these parts.
fn in_turn(n_pages: u64, n_parts: u64) -> u64 {
    (2 * n_pages).div_ceil(n_parts.max(2))
}

#[cfg(test)]
mod tests {
    use nuthatch_types::HostReads;

    use super::super::tests::{GIB, request};
    use super::super::{SizeRequest, Sizes};
    use super::*;

    /// A hundred thousand tokens of Llama-3-8B, 12.2 GiB, with digests of 32 bytes and two sequences.
    fn far(near_budget: Option<u64>) -> SizeRequest {
        SizeRequest {
            far: Some(FarRequest {
                host_usable: 100 * GIB,
                near_budget,
                pages_per_seq: 14,
                parts: 4,
                keeps_layers: false,
                codes: CodeBytes::default(),
                deciding_saved: 0,
                staged: 0,
            }),
            digest_page_bytes: 256 * 16 * 34,
            deciding: GIB,
            max_context: Some(100_000),
            max_seqs: 2,
            host_reads: HostReads::Never,
            ..request()
        }
    }

    #[test]
    fn pages_are_on_the_host_and_some_have_copies() {
        let sizes = Sizes::compute(&far(Some(4 * GIB))).unwrap();
        assert_eq!((sizes.n_pages, sizes.max_context), (2 * 6250, 100_000));
        assert_eq!(sizes.host_kv, 12_500 << 21);
        let near = sizes.near.unwrap();
        assert_eq!(near.digests, 12_500 * 256 * 16 * 34);
        assert_eq!(near.copies, u64::from(near.n_pages) << 21);
        assert_eq!(sizes.kv, near.digests + near.copies);
        // The budget is used, and never exceeded.
        let used = sizes.deciding + sizes.kv;
        assert!(used <= 4 * GIB && used > 4 * GIB - (2 << 21), "{used}");
        // Without one, copies of one sequence's pages beside the least.
        let large = SizeRequest { available: 64 * GIB, ..far(None) };
        let near = Sizes::compute(&large).unwrap().near.unwrap();
        assert_eq!(near.n_pages, 2 * 14 + 512 / 16 + 2 + 6250);
    }

    #[test]
    fn first_layers_stay_as_far_as_the_budget_goes() {
        let with = |near_budget| {
            let mut request = far(near_budget);
            request.far = request.far.map(|far| FarRequest { keeps_layers: true, ..far });
            Sizes::compute(&SizeRequest { available: 128 * GIB, ..request }).unwrap()
        };
        // A layer's pages are 781 MiB, and copies of a sequence's for two quarters of a layer 0.2 GiB.
        let few = with(Some(3 * GIB)).near.unwrap();
        assert_eq!((few.n_layers, few.layers), (0, 0));
        let sizes = with(Some(20 * GIB));
        let near = sizes.near.unwrap();
        assert_eq!((near.n_layers, near.layers), (22, (22 * 12_500) << 16));
        assert_eq!(near.copies, u64::from(near.n_pages) * (10 << 16));
        assert_eq!(sizes.host_kv, 12_500 * (10 << 16));
        let used = sizes.deciding + sizes.kv;
        assert!(near.n_pages >= 2 * 6312 / 40 && used <= 20 * GIB, "{near:?}");
        // With room for everything nothing is far, and without a budget all or nothing is.
        let all = with(Some(40 * GIB));
        assert_eq!((all.near.unwrap().n_layers, all.host_kv), (32, 0));
        let (free, near) = (with(None), all.near.unwrap());
        let budget = free.near.unwrap().budget;
        assert_eq!(free, Sizes { near: Some(NearSizes { budget, ..near }), ..all });
        let mut small = far(None);
        small.far = small.far.map(|far| FarRequest { keeps_layers: true, ..far });
        let none = Sizes::compute(&SizeRequest { available: 40 * GIB, ..small }).unwrap();
        assert_eq!(none.near.unwrap().n_layers, 0);
    }

    /// A quarter of the KV of one sequence of Llama-3-8B, as it is measured (docs/sparse-speed.md).
    #[test]
    fn heads_of_one_long_sequence_stay_in_a_quarter_of_its_pages() {
        let mut request = SizeRequest {
            digest_page_bytes: 256 * 16 * 18,
            deciding: 1_976 << 20,
            max_context: Some(131_072),
            max_seqs: 1,
            available: 128 * GIB,
            ..far(Some(4 * GIB))
        };
        request.far = request.far.map(|far| FarRequest {
            keeps_layers: true,
            codes: CodeBytes { host: 1 << 20, device: 256 * 32 },
            deciding_saved: 782 << 20,
            ..far
        });
        let near = Sizes::compute(&request).unwrap().near.unwrap();
        // And a prompt's pages have copies for two quarters of a layer at a time.
        assert!(near.n_heads >= 60 && near.n_pages >= 8192 * 2 / 128, "{near:?}");
        // A single sequence has fewer pages than a step's and its own; that is no reason to take more.
        for budget in (2000..5000).map(|mib| mib << 20) {
            let far = request.far.map(|far| FarRequest { near_budget: Some(budget), ..far });
            if let Ok(sizes) = Sizes::compute(&SizeRequest { far, max_rows: 4096, ..request }) {
                assert!(sizes.deciding + sizes.kv <= budget, "{sizes:?}");
            }
        }
    }

    /// What sequences always see was counted for each of them even if they have fewer pages, and budgets were refused.
    #[test]
    fn short_sequences_have_no_more_copies_than_pages() {
        let short = SizeRequest { max_context: Some(128), max_seqs: 8, ..far(None) };
        let far = FarRequest { pages_per_seq: 14, ..short.far.unwrap() };
        let copies = |n_pages: u64| n_pages * short.kv.page_bytes() as u64;
        let least = |near_budget| {
            let far = Some(FarRequest { near_budget: Some(near_budget), ..far });
            Sizes::compute(&SizeRequest { far, ..short })
        };
        let digests = 8 * short.digest_page_bytes; // of one sequence
        let needed = copies(64) + digests + short.deciding - far.deciding_saved;
        assert!(least(needed).is_ok(), "8 sequences of 8 pages");
        assert!(least(needed - 1).is_err());
    }

    /// Whatever the budget is: either it is kept, with all that is planned, or it is refused.
    #[test]
    fn the_budget_holds_with_codes_and_rows_on_their_way() {
        let codes = CodeBytes { host: 1 << 20, device: 256 * 32 };
        let (mut n_kept, mut n_heads) = (0, 0);
        for (mib, max_seqs) in (600..24_000).step_by(97).flat_map(|mib| [(mib, 2), (mib, 1)]) {
            for (keeps_layers, codes, staged) in [
                (false, CodeBytes::default(), 0),
                (true, codes, 0),
                (false, codes, 64 << 20),
                (true, CodeBytes::default(), 64 << 20),
            ] {
                let budget = mib << 20;
                let mut request =
                    SizeRequest { available: 128 * GIB, max_seqs, ..far(Some(budget)) };
                let deciding_saved = if codes.host > 0 { 300 << 20 } else { 0 };
                request.far = request.far.map(|far| FarRequest {
                    keeps_layers,
                    codes,
                    deciding_saved,
                    staged,
                    ..far
                });
                match Sizes::compute(&request) {
                    Ok(sizes) => {
                        let near = sizes.near.unwrap();
                        assert!(sizes.deciding + sizes.kv <= budget, "{mib} MiB: {sizes:?}");
                        assert_eq!(near.budget, budget);
                        let saved = if near.n_layers == 0 { deciding_saved } else { 0 };
                        assert_eq!(sizes.deciding, GIB - saved);
                        let n_far = u64::from(32 - near.n_layers);
                        let pages = u64::from(sizes.n_pages) * n_far;
                        assert_eq!(near.scales, pages * (codes.device / 32));
                        let host = pages * (((2 << 20) + codes.host) / 32) + near.staged;
                        assert_eq!(sizes.host_kv, host - near.heads, "{mib} MiB");
                        let head = u64::from(sizes.n_pages) * codes.host / 256;
                        assert_eq!(near.heads, u64::from(near.n_heads) * head);
                        // Heads stay one by one, beside copies of the longest sequence's pages for two parts of a layer.
                        if (codes.host, staged, near.n_layers) == (1 << 20, 0, 0)
                            && near.n_heads < 256
                        {
                            let left = budget - sizes.deciding - sizes.kv;
                            let usual = near.n_pages >= 2 * 6250 / 128 || near.n_heads == 0;
                            assert!(usual && left < head + (2 << 20), "{mib} MiB: {near:?}");
                            n_heads = n_heads.max(near.n_heads);
                        }
                        assert!(near.staged == staged || near.n_layers == 32);
                        n_kept += 1;
                    }
                    // Nothing is refused that has room if no layer stays.
                    Err(MemoryError::Near { budget: told, deciding, digests, copies, .. }) => {
                        assert_eq!((told, deciding), (budget, GIB - deciding_saved));
                        assert!(deciding + digests + copies + staged > budget);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
        assert!(n_kept > 700 && n_heads > 100, "{n_kept} {n_heads}");
    }

    #[test]
    fn digests_bound_the_pages() {
        // One sequence's, copies of its pages for two quarters of a layer, and digests of a thousand pages more.
        let digest = 256 * 16 * 34;
        let needed = GIB + (99 << 21) + 6250 * digest;
        let sizes = Sizes::compute(&far(Some(needed + 1000 * digest))).unwrap();
        assert_eq!(sizes.n_pages, 7250);
        assert_eq!(sizes.near.unwrap().n_pages, (2u32 * (6250 + 32 + 2 * 15)).div_ceil(4 * 32));
        let error = Sizes::compute(&far(Some(needed - 1))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "2.0 GiB on the device are too few: top-k attention of 2 sequences of 100000 tokens \
             needs 1.0 GiB, digests 830.1 MiB, copies of pages for prompts and of those that are \
             always seen 198.0 MiB; fewer sequences, a shorter context or a policy with fewer rows need \
             less"
        );
    }

    #[test]
    fn steps_are_as_long_as_there_is_room_for() {
        let least = GIB + 6250 * 256 * 16 * 34;
        let rows = |budget, most| {
            Sizes::with_rows(&far(Some(budget)), most).map(|sizes| sizes.max_rows).ok()
        };
        let pages = |n_rows: u64| (2 * (6250 + n_rows / 16 + 2 * 15)).div_ceil(4 * 32) << 21;
        assert_eq!(rows(least + pages(4096), 4096), Some(4096));
        assert_eq!(rows(least + pages(4096) - 1, 4096), Some(2048));
        assert_eq!(rows(least + pages(600), 4096), Some(512));
        assert_eq!(rows(least + pages(512) - 1, 4096), None);
        // The request's rows are the least.
        assert_eq!(rows(least + pages(4096), 100), Some(512));
    }

    #[test]
    fn each_memory_has_its_bound() {
        let small = FarRequest {
            host_usable: 12 * GIB,
            near_budget: None,
            pages_per_seq: 14,
            parts: 4,
            keeps_layers: false,
            codes: CodeBytes::default(),
            deciding_saved: 0,
            staged: 0,
        };
        let error = Sizes::compute(&SizeRequest { far: Some(small), ..far(None) }).unwrap_err();
        assert!(matches!(error, MemoryError::Context { fits: 98_304, .. }), "{error}");
        let swap = SizeRequest { host_bytes: 90 * GIB, ..far(None) };
        let error = Sizes::compute(&swap).unwrap_err();
        assert!(matches!(error, MemoryError::Context { .. }), "{error}");
        let asked = SizeRequest { budget: Budget::KvBytes(200 * GIB), ..far(None) };
        let error = Sizes::compute(&asked).unwrap_err();
        assert!(matches!(error, MemoryError::Host { asked, .. } if asked == 200 * GIB), "{error}");
        let error = Sizes::compute(&far(Some(40 * GIB))).unwrap_err();
        assert!(
            matches!(error, MemoryError::Kv { kv_asked, .. } if kv_asked == 40 * GIB),
            "{error}"
        );
        let some = SizeRequest { budget: Budget::KvBytes(13 * GIB), ..far(None) };
        assert_eq!(Sizes::compute(&some).unwrap().n_pages, 13 * 512);
    }
}
