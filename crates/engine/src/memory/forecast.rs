//! What a decode step takes, by rates that were measured: with full attention, with top-k attention to
//! pages on the device, and with pages on the host. It says whether pages should leave the device, how
//! many whole layers should stay (D), and of how many heads the rows come in time (N_p).

use nuthatch_types::KvShape;

/// Bytes in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// That the device reads from its own memory.
    pub read: f64,
    /// That come over the link.
    pub link: f64,
}

/// What is forecast: all sequences at their longest.
#[derive(Clone, Copy, Debug)]
pub struct ForecastRequest {
    /// What was measured.
    pub rates: Rates,
    /// Bytes of the weights.
    pub weights: u64,
    /// Of the pages.
    pub kv: KvShape,
    /// Sequences at one time.
    pub n_seqs: u32,
    /// Their tokens.
    pub context: u32,
    /// Rows that all heads of a sequence attend to.
    pub seen_rows: u64,
    /// Bytes of a page's digests.
    pub digest_page_bytes: u64,
    /// Bytes of a row as it comes over the link, as a share of its bytes in a page.
    pub row_share: f64,
    /// Whether a layer is decided about before its turn, so that rows come meanwhile.
    pub is_ahead: bool,
}

/// Share of lookups that choose again, and share of the context that moves: what `auto` did in the recorded trace of
/// docs/sparse-speed.md.
const TURNING: f64 = 0.34;
const MOVED: f64 = 0.0034;
/// Seconds that deciding, and bringing attention's parts together, add to a layer; measured on an H200.
const DECIDING_SECONDS: f64 = 22e-6;

/// Seconds of a step, and what follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// With full attention to pages on the device.
    pub full: f64,
    /// With top-k attention to pages on the device.
    pub here: f64,
    /// The same with pages on the host.
    pub far: f64,
    /// Heads of a layer whose rows come while a layer is computed, of all sequences.
    pub n_in_time: u32,
    /// Layers that would have to stay so that the link keeps up.
    pub n_layers: u32,
    /// Tokens from which on top-k attention is faster than full attention, both on the device.
    pub break_even: u32,
}

impl Forecast {
    /// Computes all of it.
    pub fn new(of: &ForecastRequest) -> Self {
        let Rates { read, link } = of.rates;
        let (layers, seqs) = (f64::from(of.kv.n_layers), f64::from(of.n_seqs));
        let heads = layers * f64::from(of.kv.n_kv_heads);
        let (context, token) = (f64::from(of.context), of.kv.token_bytes() as f64);
        let row = token / heads;
        let products = of.weights as f64 / read;
        let full = products + seqs * context * token / read;
        let digests = of.digest_page_bytes as f64 / f64::from(of.kv.page_len);
        // Seconds for each token of a context, and for each layer.
        let share = of.seen_rows as f64 / (heads * context).max(1.0);
        let token_seconds = seqs * (share.min(1.0) * token + TURNING * digests) / read;
        let here = products + context * token_seconds + layers * DECIDING_SECONDS;
        let moved = seqs * context * heads * row * of.row_share * MOVED;
        let far = if of.is_ahead { here.max(moved / link) } else { here + moved / link };
        let in_time = here / layers * link / (moved / (heads * seqs)).max(1.0);
        let late = 1.0 - here * link / moved.max(1.0);
        let gain = seqs * token / read - token_seconds;
        let break_even = layers * DECIDING_SECONDS / gain.max(1e-30);
        Forecast {
            full,
            here,
            far,
            n_in_time: in_time as u32,
            n_layers: (late.clamp(0.0, 1.0) * layers).ceil() as u32,
            break_even: break_even.ceil() as u32,
        }
    }

    /// The power of two that is not below the break-even: rates differ a little from start to start, and answers
    /// should not.
    pub fn chosen_from(&self) -> u32 {
        self.break_even.min(1 << 30).next_power_of_two()
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::KvDtype;

    use super::*;

    /// Llama-3-8B on an H200, a tenth of the rows.
    fn llama(context: u32) -> ForecastRequest {
        let kv = KvShape {
            n_layers: 32,
            n_kv_heads: 8,
            head_dim: 128,
            page_len: 16,
            dtype: KvDtype::F16,
        };
        ForecastRequest {
            rates: Rates { read: 4.3e12, link: 55e9 },
            weights: 15_000_000_000,
            kv,
            n_seqs: 1,
            context,
            seen_rows: 256 * u64::from(context) / 10,
            digest_page_bytes: 256 * 16 * 34,
            row_share: 1.0,
            is_ahead: true,
        }
    }

    #[test]
    fn long_contexts_leave_and_short_ones_do_not_gain() {
        let long = Forecast::new(&llama(131_072));
        // 3.5 ms of weights and 4 of keys and values.
        assert!((0.0074..0.0076).contains(&long.full), "{long:?}");
        assert!(long.far < 0.7 * long.full && long.far >= long.here, "{long:?}");
        assert_eq!(long.n_layers, 0);
        assert!(long.n_in_time >= 8, "{long:?}");
        // At the break-even both take the same.
        let even = Forecast::new(&llama(long.break_even));
        assert!((even.full / even.here - 1.0).abs() < 0.01, "{even:?}");
        assert!((20_000..40_000).contains(&long.break_even), "{long:?}");
        for (break_even, from) in [(0, 1), (16_384, 16_384), (24_000, 32_768), (u32::MAX, 1 << 30)]
        {
            assert_eq!(Forecast { break_even, ..long }.chosen_from(), from);
        }
        let short = Forecast::new(&llama(8192));
        assert!(short.here > short.full, "{short:?}");
    }

    #[test]
    fn a_slow_link_keeps_layers() {
        let slow = ForecastRequest {
            rates: Rates { read: 4.3e12, link: 2.5e9 },
            is_ahead: false,
            ..llama(131_072)
        };
        let found = Forecast::new(&slow);
        assert!(found.far > found.full && found.n_layers > 24 && found.n_in_time < 8, "{found:?}");
        let ahead = Forecast::new(&ForecastRequest { is_ahead: true, ..slow });
        assert!(ahead.far < found.far, "{ahead:?}");
        // In half the bytes rows take half as long.
        let coded = Forecast::new(&ForecastRequest { row_share: 0.5, ..slow });
        let halved = (found.far - found.here) / (coded.far - coded.here);
        assert!((halved - 2.0).abs() < 1e-6 && coded.n_layers < found.n_layers, "{coded:?}");
    }
}
