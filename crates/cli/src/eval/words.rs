//! What haystacks and needles are made of.

use crate::random::Random;

/// RULER's noise.
pub(super) const NOISE: &str = "The grass is green. The sky is blue. The sun is yellow. Here we \
                                go. There and back again.";

/// Prose that comes with the program.
pub(super) const PROSE: &str = include_str!("../sparse/calibration.txt");

const ADJECTIVES: [&str; 40] = [
    "ancient", "bitter", "brave", "bright", "broken", "calm", "careful", "cheap", "clever", "cold",
    "curious", "dusty", "eager", "early", "empty", "famous", "gentle", "golden", "heavy", "hidden",
    "hollow", "honest", "humble", "idle", "jolly", "lazy", "little", "lonely", "lucky", "narrow",
    "noisy", "odd", "patient", "proud", "quiet", "rapid", "rusty", "silent", "tidy", "wild",
];

const NOUNS: [&str; 50] = [
    "anchor", "apple", "basket", "beacon", "bottle", "bridge", "button", "candle", "carpet",
    "castle", "cradle", "desk", "drum", "engine", "feather", "fiddle", "garden", "glove", "hammer",
    "harbour", "island", "jacket", "kettle", "ladder", "lantern", "lemon", "magnet", "market",
    "meadow", "mirror", "needle", "orchard", "paper", "pebble", "pencil", "pillow", "pocket",
    "pumpkin", "ribbon", "river", "saddle", "shovel", "spoon", "station", "ticket", "tower",
    "tunnel", "valley", "wagon", "window",
];

const NAMES: [&str; 24] = [
    "Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katya",
    "Liam", "Mira", "Nadia", "Oscar", "Petra", "Quentin", "Rosa", "Stefan", "Tara", "Ulrich",
    "Vera", "Wanda", "Yusuf",
];

const CITIES: [&str; 24] = [
    "Aldermere",
    "Brindle",
    "Casimir",
    "Dunmore",
    "Eastvale",
    "Farrow",
    "Glenholt",
    "Harwick",
    "Ibarra",
    "Jessup",
    "Kelmscot",
    "Lindholm",
    "Marlow",
    "Norcross",
    "Oakhurst",
    "Pellworm",
    "Quarry",
    "Redruth",
    "Stavely",
    "Thornbury",
    "Ulverton",
    "Varna",
    "Westerly",
    "Yarmouth",
];

/// One of a list.
pub(super) fn choose<'a>(random: &mut Random, list: &[&'a str]) -> &'a str {
    list[random.below(list.len() as u32) as usize]
}

/// An adjective and a noun.
pub(super) fn key(random: &mut Random) -> String {
    format!("{}-{}", choose(random, &ADJECTIVES), choose(random, &NOUNS))
}

/// Seven digits.
pub(super) fn number(random: &mut Random) -> String {
    (1_000_000 + random.below(9_000_000)).to_string()
}

/// A name of 128 random bits.
pub(super) fn uuid(random: &mut Random) -> String {
    let (a, b) = (random.bits(), random.bits());
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xffff,
        b >> 48,
        b & 0xffff_ffff_ffff
    )
}

/// A person with a family name.
pub(super) fn person(random: &mut Random) -> String {
    let noun = choose(random, &NOUNS);
    let (first, rest) = noun.split_at(1);
    format!("{} {}{rest}", choose(random, &NAMES), first.to_uppercase())
}

/// A town.
pub(super) fn city(random: &mut Random) -> &'static str {
    choose(random, &CITIES)
}

/// A common word.
pub(super) fn word(random: &mut Random) -> String {
    match random.below(2) {
        0 => choose(random, &NOUNS).to_owned(),
        _ => choose(random, &ADJECTIVES).to_owned(),
    }
}

/// `n` capital letters.
pub(super) fn letters(random: &mut Random, n: usize, from: char) -> String {
    let letter = |random: &mut Random| char::from(from as u8 + random.below(26) as u8);
    (0..n).map(|_| letter(random)).collect()
}

/// Sentences of a text.
pub(super) fn sentences(text: &str) -> Vec<&str> {
    let ends = |c: char| matches!(c, '.' | '!' | '?' | '\n');
    text.split_inclusive(ends).map(str::trim).filter(|sentence| sentence.len() > 3).collect()
}

/// Mixes a list.
pub(super) fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i as u32 + 1) as usize);
    }
}
