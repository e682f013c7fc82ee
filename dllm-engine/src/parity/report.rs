//! Collects checks: one line each, with the measured error and its limit.

use std::fmt;

/// One check.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// What was compared (`P7_chunked dec1.logits, lanes 2`).
    pub name: String,
    /// Largest absolute difference, or the number of differing entries of discrete choices.
    pub error: f64,
    /// Most that is allowed.
    pub limit: f64,
    /// Entries compared. None compared is a failure: a check that looks at nothing proves nothing.
    pub compared: usize,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.compared > 0 && self.error <= self.limit
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed() { "ok  " } else { "MISS" };
        write!(
            f,
            "{verdict} {:<58} error {:>9.2e}  limit {:>8.1e}  n {}",
            self.name, self.error, self.limit, self.compared
        )
    }
}

/// Checks in the order they ran, handed to `sink` as they come.
pub struct Report<'s> {
    checks: Vec<Check>,
    sink: &'s mut dyn FnMut(&Check),
}

impl<'s> Report<'s> {
    pub fn new(sink: &'s mut dyn FnMut(&Check)) -> Self {
        Self { checks: Vec::new(), sink }
    }

    pub fn into_checks(self) -> Vec<Check> {
        self.checks
    }

    fn push(&mut self, check: Check) {
        (self.sink)(&check);
        self.checks.push(check);
    }

    /// Largest absolute difference of two arrays. NaN and unequal lengths are misses.
    pub fn close(&mut self, name: impl Into<String>, got: &[f32], want: &[f32], limit: f64) {
        let error = if got.len() == want.len() { largest_difference(got, want) } else { f64::INFINITY };
        self.push(Check { name: name.into(), error, limit, compared: want.len() });
    }

    /// Relative difference of two arrays, |got - want| / |want| in the Euclidean norm. NaN and unequal lengths are misses.
    pub fn near(&mut self, name: impl Into<String>, got: &[f32], want: &[f32], limit: f64) {
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let difference = square(&mut got.iter().zip(want).map(|(a, b)| f64::from(a - b)));
        let error = (difference / square(&mut want.iter().map(|&x| f64::from(x)))).sqrt();
        let error = if got.len() == want.len() && !error.is_nan() { error } else { f64::INFINITY };
        self.push(Check { name: name.into(), error, limit, compared: want.len() });
    }

    /// Discrete choices: every entry must be equal.
    pub fn equal<T: PartialEq>(&mut self, name: impl Into<String>, got: &[T], want: &[T]) {
        self.mostly_equal(name, got, want, 0.0);
    }

    /// Discrete choices: at most a share of the entries may differ.
    pub fn mostly_equal<T: PartialEq>(&mut self, name: impl Into<String>, got: &[T], want: &[T], share: f64) {
        let differing = got.iter().zip(want).filter(|(a, b)| a != b).count() + got.len().abs_diff(want.len());
        let limit = (share * want.len() as f64).floor();
        self.push(Check { name: name.into(), error: differing as f64, limit, compared: want.len() });
    }
}

fn largest_difference(got: &[f32], want: &[f32]) -> f64 {
    got.iter()
        .zip(want)
        .map(|(a, b)| f64::from(a - b).abs())
        .fold(0.0, |worst, d| if d.is_nan() || d > worst { if d.is_nan() { f64::INFINITY } else { d } } else { worst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_unequal_lengths_and_nothing_are_misses() {
        let mut sink = |_: &Check| {};
        let mut report = Report::new(&mut sink);
        report.close("nan", &[f32::NAN], &[0.0], 1.0);
        report.close("length", &[0.0], &[0.0, 0.0], 1.0);
        report.close("nothing", &[], &[], 1.0);
        report.equal("differs", &[1, 2], &[1, 3]);
        report.close("fine", &[0.5], &[0.25], 0.25);
        let passed: Vec<_> = report.into_checks().iter().map(Check::passed).collect();
        assert_eq!(passed, [false, false, false, false, true]);
    }
}
