//! What a request brings along: a form that its answers keep, and somebody who wants its hidden state.

use std::sync::mpsc::channel;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_engine::{
    Constraint, ConstraintError, Form, HiddenSink, Output, Submission, SubmitError,
};
use nuthatch_types::{BeamParams, FinishReason, TokenId};

use crate::echo::{CAPACITY, Script, engine, submission};

/// Allows the tokens 1, 2, 3 and so on, one after the other, and nothing after 5.
#[derive(Clone, Debug, Default)]
struct Counting {
    n_accepted: u32,
}

impl Constraint for Counting {
    fn restrict(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        if self.n_accepted == 5 {
            return Err(ConstraintError("five is enough".to_owned()));
        }
        for (id, logit) in (0..).zip(logits) {
            if id != self.n_accepted + 1 {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) {
        self.n_accepted += 1;
        assert_eq!(token.0, self.n_accepted, "what was chosen is what was allowed");
    }
}

#[test]
fn answers_keep_their_form_whatever_else_runs() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let form = Some(Form::new(|| Box::new(Counting::default())));
    let (outputs, receiver) = unbounded();
    let short = Submission { n: 2, form: form.clone(), ..submission(1, 6, 4) };
    engine.submit(short, outputs.clone(), Duration::ZERO).unwrap();
    let (long_outputs, long) = unbounded();
    let too_long = Submission { form: form.clone(), ..submission(2, 5, 20) };
    engine.submit(too_long, long_outputs, Duration::ZERO).unwrap();
    let (free_outputs, free) = unbounded();
    engine.submit(submission(3, 6, 4), free_outputs, Duration::ZERO).unwrap();
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    let tokens = |outputs: Vec<Output>, which: u32| {
        let mut tokens = Vec::new();
        let mut end = None;
        for output in outputs {
            match output {
                Output::Token { index, token, .. } if index == which => tokens.push(token.0),
                Output::Finished { index, reason, .. } if index == which => end = Some(reason),
                Output::Token { .. } | Output::Finished { .. } => {}
            }
        }
        (tokens, end)
    };
    let answers: Vec<Output> = receiver.try_iter().collect();
    for index in 0..2 {
        let expect = (vec![1, 2, 3, 4], Some(FinishReason::Length));
        assert_eq!(tokens(answers.clone(), index), expect);
    }
    let expect = (vec![1, 2, 3, 4, 5], Some(FinishReason::Failed));
    assert_eq!(tokens(long.try_iter().collect(), 0), expect, "a form that cannot be kept fails");
    let (free, end) = tokens(free.try_iter().collect(), 0);
    assert_eq!((free.len(), end), (4, Some(FinishReason::Length)));

    let beam = Some(BeamParams::new(2));
    let refused = Submission { beam, form, ..submission(1, 6, 4) };
    let refused = engine.submit(refused, outputs, Duration::ZERO);
    assert_eq!(refused, Err(SubmitError::FormOfBeams));
}

#[test]
fn a_hidden_state_is_that_of_the_prompts_last_token() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let (sender, states) = channel();
    let (outputs, _receiver) = unbounded();
    let mut expect = Vec::new();
    for seed in 0..3 {
        let (sender, request) = (sender.clone(), submission(seed, 9, 3));
        expect.push((seed, request.prompt[8].0 as f32));
        let hidden = HiddenSink::new(move |hidden| {
            assert_eq!(hidden.len(), 1);
            sender.send((seed, hidden[0])).unwrap();
        });
        let request = Submission { hidden: Some(hidden), n: 2, ..request };
        engine.submit(request, outputs.clone(), Duration::ZERO).unwrap();
    }
    while engine.step().unwrap() {}
    let mut found: Vec<_> = states.try_iter().collect();
    found.sort_by_key(|&(seed, _)| seed);
    assert_eq!(found, expect, "each once");
}
