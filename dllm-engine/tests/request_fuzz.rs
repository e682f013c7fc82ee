//! Requests with anything in them: an answer or a refusal that names the field, never a panic, and the engine goes on.

use std::cell::{Cell, RefCell};

use dllm_engine::denoise::DenoiseSettings;
use dllm_engine::{
    Control, DenoiseOverrides, Engine, EngineParams, Error, Event, FinishReason, Message, Pin, Prompt, Request, Role,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn text() -> impl Strategy<Value = String> {
    let special = prop_oneof![Just("<|turn>"), Just("<turn|>"), Just("<|channel>"), Just("<bos>"), Just("\u{e000}")];
    prop_oneof![
        3 => any::<String>(),
        2 => "[ \t\n\u{a0}]{0,9}",
        2 => vec(prop_oneof![special.prop_map(str::to_owned), "[a-z0-9 ]{0,9}"], 0..6).prop_map(|parts| parts.concat()),
        1 => ("[ a<]", 1..20_000usize).prop_map(|(c, n)| c.repeat(n)),
    ]
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let role = prop_oneof![Just(Role::System), Just(Role::User), Just(Role::Assistant)];
    let message = (role, text()).prop_map(|(role, content)| Message { role, content });
    prop_oneof![
        3 => vec(message, 0..5).prop_map(Prompt::Messages),
        2 => text().prop_map(Prompt::Raw),
        1 => vec(prop_oneof![0..1024u32, any::<u32>()], 0..9).prop_map(Prompt::Tokens),
    ]
}

fn overrides() -> impl Strategy<Value = DenoiseOverrides> {
    // Half of the values are good ones, so that some requests run.
    let steps = || option::of(prop_oneof![1..9u32, any::<u32>()]);
    let nats = || option::of(prop_oneof![0.0..2.0f32, any::<f32>()]);
    (steps(), nats(), nats(), nats(), steps(), nats()).prop_map(
        |(max_steps, t_min, t_max, bound, stable, confident)| DenoiseOverrides {
            max_steps,
            t_min,
            t_max,
            entropy_bound: bound,
            stability_threshold: stable,
            confidence_threshold: confident,
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let pin = (prop_oneof![0..64usize, any::<usize>()], prop_oneof![0..1024u32, any::<u32>()])
        .prop_map(|(position, token)| Pin { position, token });
    let max_tokens = prop_oneof![1..200usize, any::<usize>(), Just(0)];
    let stop = prop_oneof![4 => Just(vec![]), 1 => vec(text(), 0..3)];
    let pins = prop_oneof![4 => Just(vec![]), 1 => vec(pin, 0..3)];
    let overrides = prop_oneof![Just(DenoiseOverrides::default()), overrides()];
    let rest = (option::of(any::<u64>()), any::<u64>(), any::<bool>());
    (prompt(), max_tokens, overrides, stop, pins, rest).prop_map(
        |(prompt, max_tokens, denoise, stop, pins, (seed, candidate, thinking))| Request {
            prompt,
            max_tokens,
            seed,
            candidate,
            denoise,
            sampler: None,
            stop,
            thinking,
            pins,
        },
    )
}

#[test]
fn issue_2_any_request_is_answered_or_refused_with_its_reason() {
    let engine = Engine::load(EngineParams { context: 256, threads: 1, ..EngineParams::default() }).unwrap();
    let engine = RefCell::new(engine);
    let (answered, refused) = (Cell::new(0), Cell::new(0));
    TestRunner::new(Config { failure_persistence: None, cases: 400, ..Config::default() })
        .run(&request(), |request| {
            // One step is enough: what may go wrong later does not depend on the request.
            let result = engine.borrow_mut().generate(&request, &mut |event| match event {
                Event::Step(_) => Control::Cancel,
                _ => Control::Continue,
            });
            match result {
                Ok(answer) => {
                    prop_assert!(answer.tokens.len() <= request.max_tokens);
                    prop_assert!(answer.finish_reason != FinishReason::Cancelled || !answer.converged);
                    answered.set(answered.get() + 1);
                }
                Err(Error::BadArgument { .. } | Error::PromptTooLong { .. } | Error::Template(_)) => {
                    refused.set(refused.get() + 1);
                }
                Err(other) => prop_assert!(false, "{other:?}"),
            }
            Ok(())
        })
        .unwrap();
    let (answered, refused) = (answered.get(), refused.get());
    assert!(answered > 20 && refused > 20, "{answered} answered, {refused} refused: the test has lost its sense");
    let answer = engine.into_inner().generate(&Request::new("86 + 45 =").seed(1), &mut |_| Control::Continue).unwrap();
    assert_eq!(answer.text, "131");
}

fn json() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        Just("max_steps"),
        Just("t_min"),
        Just("t_max"),
        Just("entropy_bound"),
        Just("stability_threshold"),
        Just("confidence_threshold"),
        Just("temperature"),
    ];
    let value = prop_oneof![
        4 => (-2.0..12.0f64).prop_map(|n| n.to_string()),
        2 => (0..50u32).prop_map(|n| n.to_string()),
        1 => any::<f64>().prop_map(|n| n.to_string()),
        1 => prop_oneof![Just("null"), Just("1e999"), Just("-0"), Just("[]"), Just("\"1\"")].prop_map(str::to_owned),
    ];
    let object = vec((name, value), 0..4).prop_map(|fields| {
        let fields: Vec<_> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    });
    prop_oneof![6 => object, 1 => any::<String>()]
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, cases: 4000, ..Config::default() })]

    /// Settings that are accepted are in range, whatever text they came from.
    #[test]
    fn issue_2_any_json_gives_settings_in_range_or_an_error(json in json()) {
        let Ok(overrides) = serde_json::from_str::<DenoiseOverrides>(&json) else { return Ok(()) };
        match DenoiseSettings::default().with(&overrides) {
            Ok(s) => {
                prop_assert!((1..=4096).contains(&s.max_steps));
                prop_assert!(s.t_min > 0.0 && s.t_min <= s.t_max && s.t_max <= 10.0);
                prop_assert!(s.entropy_bound >= 0.0 && s.entropy_bound.is_finite());
                prop_assert!(s.confidence_threshold.is_none_or(|n| n >= 0.0 && n.is_finite()));
                prop_assert!(s.stability_threshold.is_none_or(|n| n <= 4096));
            }
            Err(error) => prop_assert!(matches!(error, Error::BadArgument { .. }), "{error:?}"),
        }
    }
}
