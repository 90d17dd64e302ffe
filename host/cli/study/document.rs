//! The study in words and tables.

use std::fmt::Write;

use ringseal::study::calibration::Calibration;
use ringseal::study::measure::KEYSTREAM_READY;

use super::figures::{Best, ByMethod, Figures, ModelRow, PER_NODE, SCALE_BYTES};

/// The methods of tables.
const METHODS: [&str; 6] = ["plain", "seed", "seed-tree", "ring", "relay", "direct"];
/// The targets: how much of the published structure's cost is to go, and how slow sealed communication may be.
const TARGET_REDUCTION: f64 = 0.90;
const TARGET_SLOWDOWN: f64 = 1.25;

/// What the command prints.
pub(super) fn summary(figures: &Figures) -> String {
    let mut text = String::new();
    match &figures.machine {
        Some(machine) => {
            line(&mut text, &format!("measured: one iteration's all-reduces, all ranks on one {machine}"));
            text += &measured_table(figures);
        }
        None => line(&mut text, "nothing measured (--backend cuda, or --measured FILE)"),
    }
    line(&mut text, "modelled: the same over NVLink, communication over the plain ring's");
    text += &modelled_table(figures, |row| &row.slowdown);
    text
}

/// docs/study.md.
pub(super) fn markdown(figures: &Figures, calibration: &Calibration) -> String {
    let mut text = String::from(INTRODUCTION);
    if figures.machine.is_none() {
        text +=
            "**Nothing in this copy was measured**: it was made without a GPU and without `--measured`.\n\n";
    }
    text += "## Beside the paper's figures\n\n";
    text += &paper(figures);
    text += "\n## Targets\n\n";
    text += &targets(figures);
    if let Some(machine) = &figures.machine {
        let _ = write!(text, "\n## Measured\n\nAll ranks on one {machine}. {MEASURED}\n\n");
        text += &measured_table(figures);
        text += "\n![Measured slowdown by model](study/slowdown-measured.svg)\n";
        if !figures.missing.is_empty() {
            text += "\nNot measured, because the kernels don't do it yet:\n\n";
            figures.missing.iter().for_each(|what| line(&mut text, &format!("* {what}")));
        }
    }
    let _ = write!(text, "\n## The model\n\n{MODEL}\n\nIts figures: {}\n\n", calibration.source);
    text += &rates(calibration);
    if !figures.errors.is_empty() {
        text += "\nThe model's time over the measured one, less one, from 1 MiB to 256 MiB on one GPU:\n\n";
        text += "| what | measurements | median of magnitudes | worst |\n|---|---|---|---|\n";
        for row in &figures.errors {
            let (median, worst) = (100.0 * row.median, 100.0 * row.worst);
            line(&mut text, &format!("| {} | {} | {median:.1} % | {worst:+.1} % |", row.what, row.count));
        }
    }
    text += "\n## Modelled: one GPU a rank, NVLink 4\n\nCommunication of one iteration over the plain ring's, DDP's default \
             cap:\n\n";
    text += &modelled_table(figures, |row| &row.slowdown);
    text += "\n![Modelled slowdown by model](study/slowdown-by-model.svg)\n";
    let _ = write!(
        text,
        "\nThe whole iteration, with communication behind the backward pass, over the same with the plain ring. It assumes \
         {} TFLOP/s a GPU (`--tflops`) and 8 sequences or 64 images a GPU:\n\n",
        figures.tflops
    );
    text += &modelled_table(figures, |row| &row.iteration_slowdown);
    text += "\n## Modelled: bucket caps\n\nCommunication over plain at 4 ranks over NVLink, by `bucket_cap_mb`.\n\n";
    text += &cap_table(figures);
    for (name, method) in [("seed", "seed"), ("ring", "ring"), ("relay", "relay")] {
        if figures.caps.iter().any(|row| row.slowdown.contains_key(method)) {
            line(&mut text, &format!("\n![{name} against the cap](study/cap-{name}.svg)"));
        }
    }
    text += "\n## Operations and bytes\n\n";
    text += OPERATIONS;
    text += &operations_table(figures);
    text += "\n![Operations and bytes](study/operations.svg)\n";
    let _ = write!(
        text,
        "\n## Modelled: cost against ranks\n\nAn all-reduce of {} MiB, nodes of {PER_NODE} GPUs, one network interface of 400 \
         Gb/s a GPU, played record by record. Microseconds:\n\n",
        SCALE_BYTES >> 20
    );
    text += &heading("ranks", &METHODS);
    for row in &figures.scale {
        line(&mut text, &format!("| {} |{}", row.ranks, cells(&row.us, |us| format!("{us:.0}"))));
    }
    text += "\n![Cost against ranks](study/cost-against-ranks.svg)\n";
    text += EXPORT;
    text
}

const INTRODUCTION: &str = "# What sealing costs the training of six models

This page is made by one command. On a GPU host, which measures first:

```
ringseal study --backend cuda --measured benches/results/study.json --out docs
```

Without a GPU, from the measurements and the calibration that are checked in:

```
ringseal study --measured benches/results/study-2026-11-29.json --out docs
```

**Measured** always means: run for real, with all ranks on one GPU, so that the link between them is the GPU's memory.
**Modelled** means computed from the equations in `study::model`, with figures fitted to measurements. No training was run,
and direct, and relay among more than two ranks, are modelled with the ring kernel's figures. All numbers are in `study/study.json`.

| method | what it is |
|---|---|
| plain | ringseal's ring, nothing sealed: what every cost is counted from |
| seed | the structure of arXiv 2501.11771: a kernel each for encrypt, MAC, copy, check, decrypt and add, at every hop; AES-128, 16,896 chains |
| seed-tree | the same as a binary tree |
| ring, relay, direct | ringseal's sealed algorithms, one persistent kernel a rank, AES-128 |

Security cost = T(method) - T(plain). Reduction = 1 - cost(best of ringseal) / cost(seed).

";

const MEASURED: &str = "Milliseconds of one iteration's all-reduces, f32, DDP's default cap, back to back; median of 3. \
                        Launches of all ranks come from one thread, which is what seed's small messages wait for; \
                        among 8 ranks its buckets of 25 MiB do too, so that its cost there is partly that thread's.";

const MODEL: &str = "The equations are in the documentation of `study::model`. Schedules are played record by record: a rank's \
                     block works on a record once it is done with the one before and once the record has arrived; links \
                     are shared; launches take time. It leaves out that training's own kernels compete for the GPU.";

const OPERATIONS: &str =
    "The published ring does 4k(n-1) seals and opens **a rank** for k all-reduces, and so n times as many in the whole group.
The paper's text uses the one figure for both. Relay and direct do 3n-2 for each all-reduce. PyTorch's bucketing rule gives
GPT-2 XL three all-reduces more than the paper's 142 (1704 operations).

";

const EXPORT: &str = "
## Schedules for simulators

`ringseal study --export-schedule FILE --algorithm relay --ranks 4` writes an all-reduce's steps as JSON: `programs` has a list
for each rank of operations, in their order, each on one of `chunks` equal chunks. `operation` is `receive`, `open` (verify
and decrypt), `reduce` (add, with the rank's own input where only one other value is listed), `store`, `seal`, `send`, or
`forward` (send on as received); `peer` the other rank; `after` the places in the same list that it waits for. A `receive` takes the
oldest chunk of `peer` that it has not taken.
";

fn line(text: &mut String, what: &str) {
    text.push_str(what);
    text.push('\n');
}

fn heading(first: &str, columns: &[&str]) -> String {
    format!("| {first} | {} |\n|---{}|\n", columns.join(" | "), "|---".repeat(columns.len()))
}

/// A cell for each method.
fn cells(values: &ByMethod, show: impl Fn(f64) -> String) -> String {
    METHODS.iter().fold(String::new(), |row, name| {
        row + &values.get(*name).map_or_else(|| "  |".into(), |value| format!(" {} |", show(*value)))
    })
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn measured_table(figures: &Figures) -> String {
    let mut columns = METHODS.to_vec();
    columns.extend(["best", "its cost", "seed's cost", "reduction"]);
    let ready = figures.measured.iter().any(|row| row.ready.is_some());
    if ready {
        columns.extend(["relay, keystream ready", "reduction"]);
    }
    let mut text = heading("model, ranks", &columns);
    for row in &figures.measured {
        let best = row.best.as_ref().map_or_else(
            || " | | | |".into(),
            |best| {
                format!(
                    " {} | {:.2} | {:.2} | {} |",
                    best.method,
                    best.cost_us / 1e3,
                    best.seed_cost_us / 1e3,
                    percent(best.reduction)
                )
            },
        );
        let cells = cells(&row.us, |us| format!("{:.2}", us / 1e3));
        let with_keystream = match (&row.ready, row.us.get(KEYSTREAM_READY)) {
            (Some(ready), Some(us)) => format!(" {:.2} | {} |", us / 1e3, percent(ready.reduction)),
            _ if ready => " | |".into(),
            _ => String::new(),
        };
        line(&mut text, &format!("| {}, {} |{cells}{best}{with_keystream}", row.workload, row.ranks));
    }
    text
}

fn modelled_table(figures: &Figures, of: impl Fn(&ModelRow) -> &ByMethod) -> String {
    let mut columns = METHODS[1..].to_vec();
    columns.push("reduction of communication's cost");
    let mut text = heading("model, ranks", &columns);
    for row in &figures.modelled {
        let mut ratios = of(row).clone();
        ratios.remove("plain");
        let cells = cells(&ratios, |ratio| format!("{ratio:.2}"));
        let cells = cells.strip_prefix("  |").unwrap_or(&cells);
        let best = row
            .best
            .as_ref()
            .map_or_else(String::new, |best| format!("{}, {}", best.method, percent(best.reduction)));
        line(&mut text, &format!("| {}, {} |{cells} {best} |", row.workload, row.ranks));
    }
    text
}

fn cap_table(figures: &Figures) -> String {
    let mut text = heading("model, cap in MB", &["all-reduces", "seed", "ring", "relay", "direct"]);
    for row in &figures.caps {
        let value = |name| row.slowdown.get(name).map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let [seed, ring, relay, direct] = ["seed", "ring", "relay", "direct"].map(value);
        line(
            &mut text,
            &format!(
                "| {}, {} | {} | {seed} | {ring} | {relay} | {direct} |",
                row.workload, row.cap_mib, row.all_reduces
            ),
        );
    }
    text
}

fn operations_table(figures: &Figures) -> String {
    let columns = [
        "parameters",
        "all-reduces",
        "MB",
        "ring, a rank, n = 2 / 4 / 8",
        "the group, n = 4",
        "relay, direct, n = 2 / 4 / 8",
    ];
    let mut text = heading("model", &columns);
    for row in &figures.operations {
        let list = |counts: &std::collections::BTreeMap<usize, usize>| {
            counts.values().map(usize::to_string).collect::<Vec<_>>().join(" / ")
        };
        line(
            &mut text,
            &format!(
                "| {} | {} | {} | {:.0} | {} | {} | {} |",
                row.workload,
                row.parameters,
                row.all_reduces,
                row.bytes as f64 / 1e6,
                list(&row.ring),
                4 * row.ring.get(&4).copied().unwrap_or_default(),
                list(&row.fewest)
            ),
        );
    }
    text
}

fn rates(calibration: &Calibration) -> String {
    let Calibration { memory_gb_s, nvlink, network, aes_128, aes_256, seed, .. } = calibration;
    let mut text = heading("figure", &["value"]);
    let mut row = |name: &str, value: String| line(&mut text, &format!("| {name} | {value} |"));
    row("memory", format!("{memory_gb_s} GB/s"));
    row("NVLink, a direction", format!("{} GB/s, {} us a hop", nvlink.gb_s, nvlink.hop_us));
    row("network, a GPU (assumed)", format!("{} GB/s, {} us a hop", network.gb_s, network.hop_us));
    for (name, kernel) in [("AES-128", aes_128), ("AES-256", aes_256)] {
        let rate = kernel.crypt_gb_s.unwrap_or_default();
        let gpu = rate * f64::from(calibration.multiprocessors);
        row(
            &format!("sealing or opening in the ring, {name}"),
            format!("{rate} GB/s a multiprocessor ({gpu:.0} a GPU), {} us a tag", kernel.tag_us),
        );
    }
    if let Some(seed) = seed {
        row("seed: encrypt or decrypt", format!("{} GB/s", seed.encrypt.gb_s));
        row("seed: MAC", format!("{} GB/s", seed.mac.gb_s));
        row("seed: copy or add", format!("{} GB/s", seed.copy.gb_s));
        row(
            "seed: a launch",
            format!("{} us of the GPU, {} us of the thread that launches", seed.mac.fixed_us, seed.issue_us),
        );
    }
    text
}

/// Mean over the models, and GPT-2 XL, of a modelled column.
fn mean_and_largest(
    figures: &Figures,
    ranks: usize,
    of: impl Fn(&ModelRow) -> Option<f64>,
) -> Option<[f64; 2]> {
    let rows = || figures.modelled.iter().filter(|row| row.ranks == ranks);
    let ratios: Vec<f64> = rows().filter_map(&of).collect();
    let largest = rows().find(|row| row.workload == "GPT-2-XL").and_then(of)?;
    Some([ratios.iter().sum::<f64>() / ratios.len() as f64, largest])
}

fn paper(figures: &Figures) -> String {
    let mut text = String::from(
        "Slowdown of an iteration. The paper's are its own measurements, on other GPUs and with its own kernels; ours are \
         modelled, over NVLink, with our kernels and assumed computation (below), behind which communication hides. They \
         aren't the same experiment, so each of ours is followed by the slowdown of the communication alone, in \
         brackets.\n\n",
    );
    text +=
        &heading("", &["arXiv 2501.11771, measured", "seed, modelled", "ring, modelled", "relay, modelled"]);
    let both = |iteration: Option<f64>, alone: Option<f64>| match (iteration, alone) {
        (Some(iteration), Some(alone)) => format!("{iteration:.2}x ({alone:.2}x)"),
        _ => "-".into(),
    };
    let mut row = |name: &str, paper: &str, ranks, column: usize| {
        let [seed, ring, relay] = ["seed", "ring", "relay"].map(|method| {
            let iteration =
                mean_and_largest(figures, ranks, |row| row.iteration_slowdown.get(method).copied());
            let alone = mean_and_largest(figures, ranks, |row| row.slowdown.get(method).copied());
            both(iteration.map(|pair| pair[column]), alone.map(|pair| pair[column]))
        });
        line(&mut text, &format!("| {name} | {paper} | {seed} | {ring} | {relay} |"));
    };
    row("4 GPUs, mean", "8.68x", 4, 0);
    row("4 GPUs, GPT-2 XL", "41.6x", 4, 1);
    row("8 GPUs, mean", "about 16x", 8, 0);
    row("8 GPUs, GPT-2 XL", "81.79x", 8, 1);
    let at_400 = |method: &str| {
        let row = figures.caps.iter().find(|row| row.workload == "GPT-2-XL" && row.cap_mib == 400);
        let of = |ratios: Option<&ByMethod>| ratios.and_then(|ratios| ratios.get(method)).copied();
        both(of(row.map(|row| &row.iteration_slowdown)), of(row.map(|row| &row.slowdown)))
    };
    let [seed, ring, relay] = ["seed", "ring", "relay"].map(at_400);
    line(&mut text, &format!("| 4 GPUs, GPT-2 XL, buckets of 400 MB | 3.03x | {seed} | {ring} | {relay} |"));
    text
}

fn targets(figures: &Figures) -> String {
    let mut text = String::new();
    let range = |values: &[f64]| {
        let (least, most) = (
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        );
        (least, most)
    };
    let verdict = |met| if met { "met" } else { "missed" };
    let measured: Vec<&Best> =
        figures.measured.iter().filter(|row| row.ranks == 4).filter_map(|row| row.best.as_ref()).collect();
    if measured.is_empty() {
        line(&mut text, "* Security cost at least 90 % below seed's, measured at n = 4: not measured here.");
    } else {
        let (least, most) = range(&measured.iter().map(|best| best.reduction).collect::<Vec<_>>());
        line(
            &mut text,
            &format!(
                "* Security cost at least 90 % below seed's, measured at n = 4 on one GPU: {} to {}, **{}**. Seed's kernels \
                 here are fast (the table of figures below), and on one GPU plain ranks move data at memory speed while \
                 all ranks' cryptography shares the one GPU.",
                percent(least),
                percent(most),
                verdict(least >= TARGET_REDUCTION)
            ),
        );
    }
    let ready = figures.measured.iter().filter(|row| row.ranks == 4).filter_map(|row| row.ready.as_ref());
    let ready: Vec<f64> = ready.map(|ready| ready.reduction).collect();
    if !ready.is_empty() {
        let (least, most) = range(&ready);
        line(
            &mut text,
            &format!(
                "* The same of the relay ring whose keystream was made before, in time that is not counted (a GPU that waits,                  or computes what leaves room, has it; ADR 9): {} to {}, **{}**.",
                percent(least),
                percent(most),
                verdict(least >= TARGET_REDUCTION)
            ),
        );
    }
    let rows = figures.modelled.iter().filter(|row| row.ranks == 4);
    let best: Vec<f64> = rows
        .filter_map(|row| {
            ["ring", "relay", "direct"]
                .iter()
                .filter_map(|name| row.slowdown.get(*name))
                .copied()
                .reduce(f64::min)
        })
        .collect();
    let (least, most) = range(&best);
    line(
        &mut text,
        &format!(
            "* Communication at most 1.25x plain, modelled at NVLink 4's rates, n = 4, best algorithm: {least:.2}x to \
             {most:.2}x, **{}**.",
            verdict(most <= TARGET_SLOWDOWN)
        ),
    );
    if let Some(all) = figures.errors.iter().find(|row| row.what == "all") {
        line(
            &mut text,
            &format!(
                "* The model's error at most 15 % in the median, 1 MiB to 256 MiB: {:.1} %, **{}**.",
                100.0 * all.median,
                verdict(all.median <= 0.15)
            ),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// docs/study.md says what the checked-in measurements and calibration say.
    #[test]
    fn the_document_is_what_the_command_writes() {
        let measured =
            serde_json::from_str(include_str!("../../../benches/results/study-2026-11-29.json")).unwrap();
        let calibration = Calibration::h200();
        let figures = Figures::new(&calibration, Some(&measured), 200.0, |_| ()).unwrap();
        let checked_in = include_str!("../../../docs/study.md");
        for (ours, theirs) in markdown(&figures, &calibration).lines().zip(checked_in.lines()) {
            assert_eq!(ours, theirs, "run the command at the top of docs/study.md again");
        }
        assert_eq!(markdown(&figures, &calibration).lines().count(), checked_in.lines().count());
    }

    #[test]
    fn without_measurements_it_says_so() {
        let calibration = Calibration { seed: None, ..Calibration::h200() };
        let figures = Figures {
            calibration: String::new(),
            machine: None,
            tflops: 200.0,
            operations: Vec::new(),
            measured: Vec::new(),
            missing: Vec::new(),
            errors: Vec::new(),
            modelled: Vec::new(),
            caps: Vec::new(),
            scale: Vec::new(),
        };
        let text = markdown(&figures, &calibration);
        assert!(text.contains("Nothing in this copy was measured") && text.contains("not measured here"));
        assert!(!text.contains("## Measured"));
        assert!(summary(&figures).contains("nothing measured"));
    }
}
