//! One request's life: budget, end of generation, pins, stop rule, cancel, refusals.

mod common;

use common::{EOG, SHAPE, alone, lanes, silent, work};
use dllm_engine::Error;
use dllm_engine::denoise::scripted::{Scripted, Seen};
use dllm_engine::denoise::{Lanes, Settle, Work};
use dllm_engine::event::{Control, Event, FinishReason};
use dllm_engine::kernels::position_stats::position_stats;
use dllm_engine::model::{Position, Shape};
use dllm_engine::params::Pin;
use dllm_engine::sampler::by_name;

/// A network that is certain of the given canvas.
fn certain(tokens: [u32; 8]) -> Lanes<Scripted> {
    let script = move |_: &Seen<'_>, out: &mut [Position]| {
        for (p, token) in out.iter_mut().zip(tokens) {
            *p = Position { argmax: token, drawn: token, entropy: 0.0, argmax_prob: 1.0, drawn_prob: 1.0 };
        }
        Ok(())
    };
    Lanes::new(Scripted::new(Shape { lanes: 1, ..SHAPE }, Box::new(script)), 16)
}

#[test]
fn candidates_of_one_seed_differ_and_repeat() {
    // Five certain positions would hide the noise: compare what went in.
    let first_input = |candidate| {
        let mut input = Vec::new();
        lanes(1)
            .generate(work(&[1, 2], 8, candidate), &mut |event| {
                if let Event::Step(step) = event {
                    input.extend_from_slice(step.input);
                }
                Control::Continue
            })
            .unwrap();
        input
    };
    assert_eq!(first_input(0), first_input(0));
    assert_ne!(first_input(0), first_input(1));
}

#[test]
fn end_of_generation_at_the_start_gives_an_empty_answer() {
    let done = certain([EOG, 1, 2, 3, 4, 5, 6, 7]).generate(work(&[1], 24, 0), &mut silent).unwrap();
    assert_eq!((done.tokens.len(), done.finish_reason, done.converged), (0, FinishReason::Stop, true));
    assert_eq!(done.cost.steps_per_canvas, [2]);
}

#[test]
fn end_of_generation_behind_max_tokens_is_length() {
    let canvas = [1, 2, EOG, 3, 4, 5, 6, 7];
    for (max_tokens, tokens, reason) in [
        (1, &[1][..], FinishReason::Length),
        (2, &[1, 2][..], FinishReason::Stop),
        (8, &[1, 2][..], FinishReason::Stop),
    ] {
        let done = certain(canvas).generate(work(&[1], max_tokens, 0), &mut silent).unwrap();
        assert_eq!((&done.tokens[..], done.finish_reason), (tokens, reason), "{max_tokens}");
    }
}

#[test]
fn one_step_is_enough() {
    let mut one = work(&[1], 8, 0);
    one.settings.max_steps = 1;
    let done = alone(one);
    assert_eq!((done.tokens.len(), done.cost.steps_per_canvas, done.converged), (8, vec![1], false));
}

#[test]
fn threshold_zero_stops_at_the_first_confident_step() {
    let canvas = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut first = work(&[1], 8, 0);
    first.settings.stability_threshold = Some(0);
    assert_eq!(certain(canvas).generate(first, &mut silent).unwrap().cost.steps_per_canvas, [1]);
    let mut never = work(&[1], 8, 0);
    never.settings.confidence_threshold = Some(0.0);
    assert_eq!(certain(canvas).generate(never, &mut silent).unwrap().cost.steps_per_canvas, [12]);
    let mut absent = work(&[1], 8, 0);
    absent.settings.stability_threshold = None;
    let done = certain(canvas).generate(absent, &mut silent).unwrap();
    assert_eq!((done.cost.steps_per_canvas, done.converged), (vec![12], false));
}

#[test]
fn pins_survive_every_step_and_the_commit() {
    let mut pinned = work(&[1, 2], 16, 0);
    let pins = [(0, 41), (7, 42), (8, 43), (13, 44)].map(|(position, token)| Pin { position, token });
    pinned.pins = pins.to_vec();
    pinned.pins.reverse();
    pinned.eog = [].into();
    let mut steps = 0;
    let mut lanes = lanes(1);
    let done = lanes
        .generate(pinned, &mut |event| {
            if let Event::Step(step) = event {
                for pin in pins.iter().filter(|pin| pin.position / 8 == step.canvas) {
                    let i = pin.position % 8;
                    let seen = [step.input[i], step.drawn[i], step.argmax[i], step.output[i]];
                    assert_eq!(seen, [pin.token; 4], "{pin:?}");
                    assert_eq!((step.accepted[i], step.entropy[i]), (true, 0.0));
                }
                steps += 1;
            }
            Control::Continue
        })
        .unwrap();
    assert!(steps > 2);
    assert_eq!(done.tokens.len(), 16);
    for pin in pins {
        assert_eq!(done.tokens[pin.position], pin.token);
    }
    assert_eq!(lanes.cached(0)[2], 41, "the committed canvas");
    assert_eq!(lanes.cached(0)[9], 42, "the committed canvas");
}

#[test]
fn a_canvas_of_pins_only_comes_back_as_it_is() {
    let mut pinned = work(&[1], 8, 0);
    pinned.pins = (0..8).map(|position| Pin { position, token: 50 + position as u32 }).collect();
    let done = alone(pinned);
    assert_eq!((done.tokens, done.converged), ((50..58).collect(), true));
}

#[test]
fn issue_3_an_end_token_before_a_given_position_ends_nothing() {
    let canvas = [1, EOG, 3, 4, EOG, 6, EOG, 8];
    for (pin, tokens) in [(3, &[1, EOG, 3, 40][..]), (5, &[1, EOG, 3, 4, EOG, 40][..])] {
        let mut pinned = work(&[1], 24, 0);
        pinned.pins = vec![Pin { position: pin, token: 40 }];
        let done = certain(canvas).generate(pinned, &mut silent).unwrap();
        assert_eq!((&done.tokens[..], done.finish_reason), (tokens, FinishReason::Stop), "given at {pin}");
    }
    // A given position in the second canvas keeps the first one whole.
    let mut pinned = work(&[1], 24, 0);
    pinned.pins = vec![Pin { position: 8, token: 40 }];
    let done = certain(canvas).generate(pinned, &mut silent).unwrap();
    assert_eq!((&done.tokens[..8], &done.tokens[8..]), (&canvas[..], &[40][..]));
}

#[test]
fn all_logits_not_a_number() {
    let script = |seen: &Seen<'_>, out: &mut [Position]| {
        let row = [f32::NAN; SHAPE.vocab];
        out.iter_mut().zip(seen.uniform).for_each(|(p, u)| *p = position_stats(&row, Some(30.0), seen.temperature, *u));
        Ok(())
    };
    let mut lanes = Lanes::new(Scripted::new(Shape { lanes: 1, ..SHAPE }, Box::new(script)), 16);
    let error = lanes.generate(work(&[1], 8, 0), &mut silent).unwrap_err();
    assert!(matches!(error, Error::NotFinite { step: 1, position: 0, .. }), "{error}");
}

#[test]
fn cancel_at_a_step_keeps_what_is_finished() {
    for at in 1..10 {
        let (mut steps, mut finished_canvases) = (0, 0);
        let mut endless = work(&[1, 2], 40, 0);
        endless.eog = [].into();
        let mut lanes = lanes(1);
        let done = lanes
            .generate(endless, &mut |event| match event {
                Event::Step(_) => {
                    steps += 1;
                    if steps == at { Control::Cancel } else { Control::Continue }
                }
                Event::Canvas { .. } => {
                    finished_canvases += 1;
                    Control::Continue
                }
                _ => Control::Continue,
            })
            .unwrap();
        assert_eq!((steps, done.finish_reason), (at, FinishReason::Cancelled), "no step after the cancel");
        assert_eq!(done.tokens.len(), 8 * finished_canvases);
        assert_eq!(done.cost.steps_per_canvas.iter().sum::<u32>(), at);
        assert_eq!(lanes.free(), 1);
    }
}

#[test]
fn a_full_context_ends_with_length() {
    // 64 tokens: 40 of prompt, then canvases at 40, 48 and 56.
    let mut endless = work(&(0..40).collect::<Vec<_>>(), 1000, 0);
    endless.eog = [].into();
    let done = alone(endless);
    assert_eq!((done.tokens.len(), done.finish_reason), (24, FinishReason::Length));

    let mut brim = work(&(0..56).collect::<Vec<_>>(), 1000, 0);
    brim.eog = [].into();
    assert_eq!(alone(brim).tokens.len(), 8);
    let error = lanes(1).admit(work(&(0..57).collect::<Vec<_>>(), 8, 0)).unwrap_err();
    assert!(matches!(error, Error::PromptTooLong { tokens: 57, fits: 56, context: 64, canvas: 8 }), "{error}");
}

#[test]
fn work_that_cannot_be_done_is_refused() {
    let refused = |work: Work, name: &str| match lanes(1).admit(work).unwrap_err() {
        Error::BadArgument { name: got, .. } => assert_eq!(got, name),
        other => panic!("{other}"),
    };
    refused(work(&[], 8, 0), "prompt");
    refused(work(&[100], 8, 0), "prompt");
    refused(work(&[1], 0, 0), "max_tokens");
    let with = |pins: &[(usize, u32)]| {
        let mut work = work(&[1], 8, 0);
        work.pins = pins.iter().map(|(position, token)| Pin { position: *position, token: *token }).collect();
        work
    };
    refused(with(&[(8, 1)]), "pins");
    refused(with(&[(0, 100)]), "pins");
    refused(with(&[(3, 1), (0, 1), (3, 2)]), "pins");
    let mut hot = work(&[1], 8, 0);
    hot.settings.t_max = f32::NAN;
    refused(hot, "t_max");
    assert!(by_name("nonsense").unwrap_err().to_string().contains("entropy-bound"));
}

/// Text that stops at a token, and holds the last token back; the third number counts tokens.
struct StopAt(u32, Option<u32>, usize);

impl Settle for StopAt {
    fn settle(&mut self, tokens: &[u32], last: bool, text: &mut String) -> Option<usize> {
        for token in tokens {
            if let Some(held) = self.1.take() {
                text.push_str(&format!("{held} "));
            }
            if *token == self.0 {
                return Some(self.2);
            }
            self.1 = Some(*token);
            self.2 += 1;
        }
        if last && let Some(held) = self.1.take() {
            text.push_str(&format!("{held} "));
        }
        None
    }

    fn reasoning(&mut self) -> Option<String> {
        Some("thought".into())
    }
}

#[test]
fn stop_texts_end_the_answer_and_text_comes_canvas_by_canvas() {
    let all = {
        let mut all = work(&[1, 2, 3], 16, 0);
        all.eog = [].into();
        alone(all).tokens
    };
    let stop = all[11];
    let at = all.iter().position(|token| *token == stop).unwrap();
    let mut stopped = work(&[1, 2, 3], 16, 0);
    stopped.eog = [].into();
    stopped.text = Box::new(StopAt(stop, None, 0));
    let mut heard = String::new();
    let done = lanes(1)
        .generate(stopped, &mut |event| {
            if let Event::Canvas { text, .. } = event {
                heard.push_str(text);
            }
            Control::Continue
        })
        .unwrap();
    assert_eq!((&done.tokens[..], done.finish_reason), (&all[..at], FinishReason::Stop));
    assert_eq!(done.text, all[..at].iter().map(|token| format!("{token} ")).collect::<String>());
    assert_eq!((heard, done.reasoning.as_deref()), (done.text, Some("thought")));
}

/// Keeps a number of tokens that was reached before the last canvas.
struct TakesBack(usize);

impl Settle for TakesBack {
    fn settle(&mut self, tokens: &[u32], _: bool, _: &mut String) -> Option<usize> {
        let kept = self.0;
        self.0 = 3;
        (kept == 3 && !tokens.is_empty()).then_some(3)
    }
}

#[test]
fn issue_2_a_stop_text_may_take_tokens_of_an_earlier_canvas_back() {
    let request = |text: Box<dyn Settle>| {
        let mut request = work(&[1, 2, 3], 40, 0);
        (request.eog, request.text) = ([].into(), text);
        alone(request)
    };
    let all = request(Box::new(StopAt(u32::MAX, None, 0))).tokens;
    let stopped = request(Box::new(TakesBack(0)));
    assert_eq!((&stopped.tokens[..], stopped.finish_reason), (&all[..3], FinishReason::Stop));
    assert_eq!(stopped.cost.steps_per_canvas.len(), 2, "the canvas that completed the stop text was made");
}

#[test]
fn held_back_text_comes_with_a_cancel() {
    let mut cancelled = work(&[1, 2, 3], 40, 0);
    cancelled.eog = [].into();
    cancelled.text = Box::new(StopAt(u32::MAX, None, 0));
    let cancel = |event: Event<'_>| if let Event::Canvas { .. } = event { Control::Cancel } else { Control::Continue };
    let done = lanes(1).generate(cancelled, &mut { cancel }).unwrap();
    assert_eq!(done.finish_reason, FinishReason::Cancelled);
    assert_eq!(done.text, done.tokens.iter().map(|token| format!("{token} ")).collect::<String>());
    assert_eq!(done.tokens.len(), 8);
}
