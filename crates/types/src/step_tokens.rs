//! The tokens of one sequence in one step: nearly always one, which then needs no memory of its own.

use std::ops::Deref;

use crate::TokenId;

/// The tokens of one sequence in one step; reads like a slice.
#[derive(Clone, Debug)]
pub struct StepTokens(Repr);

#[derive(Clone, Debug)]
enum Repr {
    One([TokenId; 1]),
    Many(Vec<TokenId>),
}

impl Deref for StepTokens {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        match &self.0 {
            Repr::One(token) => token,
            Repr::Many(tokens) => tokens,
        }
    }
}

impl PartialEq for StepTokens {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for StepTokens {}

impl From<TokenId> for StepTokens {
    fn from(token: TokenId) -> Self {
        StepTokens(Repr::One([token]))
    }
}

impl From<&[TokenId]> for StepTokens {
    fn from(tokens: &[TokenId]) -> Self {
        match *tokens {
            [token] => token.into(),
            _ => StepTokens(Repr::Many(tokens.to_vec())),
        }
    }
}

impl FromIterator<TokenId> for StepTokens {
    fn from_iter<T: IntoIterator<Item = TokenId>>(tokens: T) -> Self {
        StepTokens(Repr::Many(tokens.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_read_like_the_slice_they_were_made_from() {
        for n in 0..4 {
            let tokens: Vec<TokenId> = (0..n).map(TokenId).collect();
            let from_slice = StepTokens::from(&tokens[..]);
            let collected: StepTokens = tokens.iter().copied().collect();
            assert_eq!((&*from_slice, &*collected), (&tokens[..], &tokens[..]));
            assert_eq!(from_slice, collected);
        }
        assert_eq!(*StepTokens::from(TokenId(7)), [TokenId(7)]);
    }
}
