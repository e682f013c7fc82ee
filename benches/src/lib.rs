//! Benches only; see benches/.
