//! `namespace` of chat templates.
//!
//! minijinja's own can be made to hold itself (`{% set ns.x = ns %}`), and whatever reads that to its end, to print or
//! compare it, overflows the stack. This one looks at the stack and charges whenever it is read, so such a reading ends;
//! then the rendering fails. What a rendering has left in its namespaces is taken out afterwards, or those that hold
//! themselves would stay in memory for ever.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::value::{Enumerator, Object, Value};
use minijinja::{Environment, Error, ErrorKind};

use crate::bounded::{ELEMENT, charge};

/// What listing a namespace costs.
const LISTING: usize = 16 << 10;

thread_local! {
    /// An address near the bottom of this thread's stack, and how far from it a namespace may be read.
    static STACK: Cell<(usize, usize)> = const { Cell::new((0, usize::MAX)) };
    /// Why a reading was ended: the budget is used up, or it went too deep.
    static ENDED: Cell<Option<ErrorKind>> = const { Cell::new(None) };
    static ALL: RefCell<Vec<Arc<Namespace>>> = const { RefCell::new(Vec::new()) };
}

/// Runs a rendering, which may use `depth` bytes of this thread's stack and still read a namespace.
///
/// # Errors
/// The rendering's, and one where a reading was ended.
pub fn within<T>(depth: usize, rendering: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    STACK.set((here(), depth));
    let result = rendering();
    // All are held here until the last is empty, so that none is dropped within another.
    let all = ALL.take();
    for namespace in &all {
        drop(std::mem::take(&mut *namespace.lock()));
    }
    match ENDED.get() {
        Some(ErrorKind::WriteFailure) => Err(ErrorKind::WriteFailure.into()),
        Some(kind) => Err(Error::new(kind, "a namespace refers to itself")),
        None => result,
    }
}

/// Gives an environment the function, and the filter that assignments are compiled to.
pub fn install(env: &mut Environment<'static>) {
    env.add_function("namespace", |from: Option<Value>| -> Result<Value, Error> {
        let new = Arc::new(Namespace::default());
        // Keyword arguments are a map, too.
        if let Some(from) = from {
            let pairs = from.as_object().and_then(|map| map.try_iter_pairs()).ok_or_else(|| {
                let why = format!("namespace needs a map or keyword arguments, got {}", from.kind());
                Error::new(ErrorKind::InvalidOperation, why)
            })?;
            for (key, value) in pairs {
                new.set(&key.to_string(), value)?;
            }
        }
        ALL.with_borrow_mut(|all| all.push(new.clone()));
        Ok(Value::from_dyn_object(new))
    });
    env.add_filter("=", |value: Value, namespace: Value, name: &str| {
        match namespace.downcast_object_ref::<Namespace>() {
            Some(namespace) => namespace.set(name, value),
            None => {
                let why = format!("can only assign to namespaces, not {}", namespace.kind());
                Err(Error::new(ErrorKind::InvalidOperation, why))
            }
        }
    });
}

/// About where the top of the stack is.
fn here() -> usize {
    let local = 0u8;
    std::hint::black_box(&raw const local).addr()
}

#[derive(Default)]
struct Namespace(Mutex<BTreeMap<Arc<str>, Value>>);

impl Namespace {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, name: &str, value: Value) -> Result<(), Error> {
        charge(name.len() + ELEMENT)?;
        // What was there is dropped after the lock: it may hold this namespace.
        let before = self.lock().insert(name.into(), value);
        drop(before);
        Ok(())
    }

    /// What it holds, unless it has been read too deeply or too often.
    fn read(&self, cost: usize) -> Option<MutexGuard<'_, BTreeMap<Arc<str>, Value>>> {
        let (bottom, most) = STACK.get();
        let ended = match charge(cost) {
            _ if bottom.abs_diff(here()) > most => Some(ErrorKind::InvalidOperation),
            Ok(()) => None,
            Err(over) => Some(over.kind()),
        };
        ENDED.set(ENDED.get().or(ended));
        if ENDED.get().is_some() {
            return None;
        }
        Some(self.lock())
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.read(ELEMENT)?.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match self.read(LISTING) {
            Some(held) => Enumerator::Values(held.keys().cloned().map(Value::from).collect()),
            None => Enumerator::Empty,
        }
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Copied, so that nothing is locked while one is written that holds this one.
        let held: Vec<_> =
            self.read(LISTING).iter().flat_map(|held| held.iter()).map(|(k, v)| (k.clone(), v.clone())).collect();
        f.debug_map().entries(held).finish()
    }
}
