//! Flags of vLLM, SGLang and llama-server that are more than other names of ours, which are clap's
//! aliases: before anything is parsed, words of ours are put in their place, or none.

use std::ffi::OsString;

use crate::config::ConfigError;

/// The flag alone.
const BARE: &str = "";
/// Every other value.
const ANY: &str = "*";
/// Nothing to say: it is so anyway.
const SO: &str = "";
/// Nothing that comes with a model is ever run, and nothing is compiled for it.
const SWITCHES: &str = "--trust-remote-code --enforce-eager --enable-auto-tool-choice \
    --enable-prompt-tokens-details --enable-chunked-prefill --disable-log-requests --enable-metrics \
    --metrics --jinja --cont-batching --cache-prompt";
const SPLITS: &str = "-tp --tp --tp-size --tensor-parallel-size --pipeline-parallel-size \
    --data-parallel-size";
const KV_TYPES: &str = "-ctk --cache-type-k -ctv --cache-type-v";
const KV_TYPE: &str = "--kv-cache-dtype=";
const VALUE: &str = "needs a value";
const NO_SEED: &str = "requests have their own: `\"seed\": 1` in the body repeats an answer";

/// Attention is as it is, whatever is said of it.
const FLASH: [(&str, &str); 6] =
    [(BARE, SO), ("on", SO), ("off", SO), ("auto", SO), ("1", SO), ("0", SO)];

/// A flag's names; for each value what is said here, before the value if it ends in `=`; and why other
/// values are refused.
type Peer = (&'static str, &'static [(&'static str, &'static str)], &'static str);

const PEERS: [Peer; 11] = [
    ("-hf -hfr --hf-repo", &[(ANY, "--model=")], VALUE),
    ("-np", &[(ANY, "--max-num-seqs=")], VALUE),
    ("-a --alias", &[(ANY, "--served-model-name=")], VALUE),
    ("-b", &[(ANY, "--max-num-batched-tokens=")], VALUE),
    (KV_TYPES, &[("q8_0", "--kv-cache-dtype=int8"), (ANY, KV_TYPE)], VALUE),
    ("-ngl --gpu-layers --n-gpu-layers", &[("0", "--device=cpu"), (ANY, SO)], VALUE),
    ("-fa --flash-attn", &FLASH, "on, off or auto"),
    (SPLITS, &[("1", SO)], "one GPU only: a model is not split"),
    ("--dtype", &[("auto", SO)], "weights are used as the files have them: say auto"),
    ("--seed", &[], NO_SEED),
    (SWITCHES, &[(BARE, SO)], "takes no value"),
];

/// The words of a command line with an engine in our own terms.
pub(crate) fn in_our_words(words: Vec<OsString>) -> Result<Vec<OsString>, ConfigError> {
    let names = words.iter().skip(1).filter_map(|word| word.to_str());
    let command = names.clone().find(|word| !word.starts_with('-')).unwrap_or_default();
    if !["run", "serve", "batch", "bench", "eval", "profile"].contains(&command) {
        return Ok(words);
    }
    let has_seed = ["run", "bench", "eval"].contains(&command);
    let (mut ours, mut kv_types) = (Vec::new(), Vec::new());
    // What comes behind `--` is text.
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next_if(|word| word != "--") {
        let text = word.to_string_lossy().into_owned();
        let (flag, attached) = text.split_once('=').unzip();
        let flag = flag.unwrap_or(&text);
        let peer = PEERS.iter().find(|(flags, ..)| flags.split(' ').any(|name| name == flag));
        let Some((_, all, why)) = peer.filter(|_| !(has_seed && flag == "--seed")) else {
            ours.push(word);
            continue;
        };
        // A number may be below zero; what else begins so is the next flag.
        let is_value = |word: &&str| !word.starts_with('-') || word.parse::<i64>().is_ok();
        let next = words.peek().and_then(|word| word.to_str()).filter(is_value);
        let value = attached.or(next).unwrap_or(BARE).to_owned();
        let of = |wanted: &str| all.iter().find(|(value, _)| *value == wanted);
        let bare = of(BARE).filter(|_| attached.is_none());
        let any = of(ANY).filter(|_| value != BARE);
        let Some((known, said)) = of(&value).or(bare).or(any) else {
            return Err(ConfigError::Peer(format!("{flag} {value}"), why));
        };
        if attached.is_none() && *known != BARE {
            words.next();
        }
        let said = if said.ends_with('=') { format!("{said}{value}") } else { said.to_string() };
        match &said[..] {
            SO => {}
            _ if said.starts_with(KV_TYPE) => kv_types.push(said),
            _ => ours.push(said.into()),
        }
    }
    // Who says nothing of one of both means f16.
    if kv_types.len() == 1 {
        kv_types.push(format!("{KV_TYPE}f16"));
    }
    if kv_types.iter().any(|one| *one != kv_types[0]) {
        let why = "keys and values are stored alike: say the same type twice";
        return Err(ConfigError::Peer("-ctk and -ctv".to_owned(), why));
    }
    ours.extend(kv_types.pop().map(OsString::from));
    ours.extend(words);
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Args;
    use clap::Parser as _;

    fn ours(line: &str) -> Result<String, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        let ours = in_our_words(words).map_err(|error| error.to_string())?;
        Ok(ours.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn what_peers_say_is_said_in_our_words() {
        for (typed, expect) in [
            (
                "serve -hf org/name:Q4_K_M -np 4 -c 8192",
                "serve --model=org/name:Q4_K_M --max-num-seqs=4 -c 8192",
            ),
            (
                "serve -a bird m.gguf -ngl 99 -fa -b 512",
                "serve --served-model-name=bird m.gguf --max-num-batched-tokens=512",
            ),
            ("serve -ngl 0 -fa on --flash-attn auto", "serve --device=cpu"),
            ("serve -ctk q8_0 m.gguf --cache-type-v=q8_0", "serve m.gguf --kv-cache-dtype=int8"),
            ("serve -ctk f16", "serve --kv-cache-dtype=f16"),
            ("serve m --tensor-parallel-size 1 --tp=1 --dtype auto", "serve m"),
            ("serve --trust-remote-code m --enforce-eager --jinja", "serve m"),
            ("-v bench -hf a/b -ngl all -fa 1", "-v bench --model=a/b"),
            ("eval -ngl -1 --seed 3", "eval --seed 3"),
            ("run --seed 3 hello", "run --seed 3 hello"),
            ("bench serve --seed 3", "bench serve --seed 3"),
            ("serve --alias bird m.gguf", "serve --served-model-name=bird m.gguf"),
            ("simulate -np 3", "simulate -np 3"),
            ("run -ctk f16 -- -np -a", "run --kv-cache-dtype=f16 -- -np -a"),
        ] {
            assert_eq!(ours(&format!("nuthatch {typed}")), Ok(format!("nuthatch {expect}")));
        }
    }

    #[test]
    fn what_is_not_so_is_refused_with_the_reason() {
        for (typed, expect) in [
            ("serve m -ngl --isolate-tenants", "needs a value"),
            ("serve m -a -- text", "needs a value"),
            ("serve --tp 2", "--tp 2: one GPU only"),
            ("serve --tensor-parallel-size=8", "--tensor-parallel-size 8: one GPU only"),
            ("serve --dtype float32", "weights are used as the files have them"),
            ("serve --seed 1", "requests have their own"),
            ("serve -fa=maybe", "on, off or auto"),
            ("serve --jinja=no", "takes no value"),
            ("serve -ctk q8_0", "-ctk and -ctv: keys and values are stored alike"),
            ("serve -ctk q8_0 -ctv f16", "stored alike"),
        ] {
            let error = ours(&format!("nuthatch {typed}")).unwrap_err();
            assert!(error.contains(expect), "{typed}: {error}");
        }
    }

    /// Whatever the table says instead must be a flag of `serve`.
    #[test]
    fn our_words_are_flags() {
        for (flags, all, _) in &PEERS {
            for (_, said) in all.iter().filter(|(_, said)| *said != SO) {
                let word =
                    if said.ends_with('=') { format!("{said}3") } else { (*said).to_owned() };
                let word = word.replace("dtype=3", "dtype=f16");
                let parsed = Args::try_parse_from(["nuthatch", "serve", &word]);
                assert!(parsed.is_ok(), "{flags:?}: {word}");
            }
        }
    }
}
