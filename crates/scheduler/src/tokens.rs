//! The tokens of one sequence.

use nuthatch_types::TokenId;

/// Tokens that are kept beside their sequence: one page of the usual length.
const TAIL_LEN: usize = 16;

/// The tokens of one sequence; they only become more.
///
/// The newest ones are kept with the sequence and move to memory of their own many at a time: a
/// store to other memory for each of thousands of sequences would take most of a step.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    settled: Vec<TokenId>,
    n_tail: u32,
    tail: [TokenId; TAIL_LEN],
}

impl Tokens {
    pub(crate) fn len(&self) -> u32 {
        self.settled.len() as u32 + self.n_tail
    }

    pub(crate) fn push(&mut self, token: TokenId) {
        if self.n_tail as usize == TAIL_LEN {
            self.settle();
        }
        self.tail[self.n_tail as usize] = token;
        self.n_tail += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &TokenId> {
        self.settled.iter().chain(&self.tail[..self.n_tail as usize])
    }

    /// Moves the newest tokens to the others. Those of a sequence that does not run are there.
    pub(crate) fn settle(&mut self) -> &[TokenId] {
        self.settled.extend_from_slice(&self.tail[..self.n_tail as usize]);
        self.n_tail = 0;
        &self.settled
    }

    /// The tokens of a sequence that does not run, or has not yet sampled any.
    pub(crate) fn settled(&self) -> &[TokenId] {
        assert_eq!(self.n_tail, 0, "all tokens are settled");
        &self.settled
    }
}

impl From<Vec<TokenId>> for Tokens {
    fn from(settled: Vec<TokenId>) -> Self {
        Tokens { settled, n_tail: 0, tail: [TokenId::default(); TAIL_LEN] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stay_in_order_wherever_they_are() {
        let mut tokens = Tokens::from(vec![TokenId(0)]);
        for i in 1..100 {
            tokens.push(TokenId(i));
            assert_eq!(tokens.len(), i + 1);
            assert!(tokens.iter().map(|token| token.0).eq(0..=i));
            if i % 7 == 0 {
                assert_eq!(tokens.settle().len(), i as usize + 1);
                assert_eq!(tokens.settled().last(), Some(&TokenId(i)));
            }
        }
    }
}
