//! The table, and the same as JSON.

use ringseal::study::overlap::Iteration;
use serde_json::{Value, json};

/// What an iteration took.
pub(crate) struct Measured {
    /// The median one.
    pub(crate) iteration: Iteration,
    /// On average.
    pub(crate) joules: Option<f64>,
    /// Records of all rounds and ranks whose keystream was not there in time.
    pub(crate) misses: Option<u32>,
}

/// One way to reduce the gradients.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// Blocks of each rank's all-reduces, each on a multiprocessor.
    pub(crate) blocks: Option<u32>,
    pub(crate) measured: Measured,
}

/// Rows beside the products alone.
pub(crate) struct Report {
    alone: Iteration,
    /// The latest plain all-reduces by the same kernels, and their blocks.
    plain: Option<(Iteration, Option<u32>)>,
    rows: Vec<Value>,
}

impl Report {
    /// Begins with the products alone.
    pub(crate) fn new(measured: Measured) -> Self {
        println!(
            "{:>12} {:>5} {:>13} {:>12} {:>11} {:>9} {:>12} {:>9}",
            "all-reduces", "SMs", "iteration us", "products us", "exposed us", "slowdown", "security us", "J"
        );
        let mut report = Self { alone: measured.iteration, plain: None, rows: Vec::new() };
        report.add(Row { name: "none", blocks: None, measured });
        report
    }

    pub(crate) fn add(&mut self, row: Row) {
        let Row { name, blocks, measured: Measured { iteration, joules, misses } } = row;
        if name == "plain" {
            self.plain = Some((iteration, blocks));
        }
        // Of the same multiprocessors.
        let plain = self.plain.filter(|(_, of)| blocks.is_some() && *of == blocks);
        let security = plain.map(|(plain, _)| iteration.security_us(&plain));
        let (exposed, slowdown) = (iteration.exposed_us(&self.alone), iteration.slowdown(&self.alone));
        let text = |figure: Option<f64>, digits: usize| {
            figure.map_or_else(|| "-".into(), |figure| format!("{figure:.digits$}"))
        };
        println!(
            "{name:>12} {:>5} {:>13.1} {:>12.1} {exposed:>11.1} {:>8.1}% {:>12} {:>9}",
            blocks.map_or_else(|| "-".into(), |blocks| blocks.to_string()),
            iteration.total_us,
            iteration.compute_us,
            100.0 * slowdown,
            text(security, 1),
            text(joules, 3),
        );
        self.rows.push(json!({
            "all_reduces": name, "blocks": blocks, "iteration_us": iteration.total_us, "products_us": iteration.compute_us,
            "exposed_us": exposed, "slowdown": slowdown, "security_us": security, "joules": joules,
            "keystream_misses": misses,
        }));
    }

    /// The whole run: `about` says of what.
    pub(crate) fn json(&self, about: &Value) -> Value {
        json!({ "run": about, "rows": self.rows })
    }
}
