//! Tests through the public face of the crate.

#[cfg(test)]
mod common;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod stream;
#[cfg(test)]
mod templates;
#[cfg(test)]
mod tokenizers;
