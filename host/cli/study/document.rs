//! The study in words and tables.

use std::fmt::Write;

use ringseal::collective::Algorithm;
use ringseal::collective::schedule::{Collective, Schedule};
use ringseal::study::calibration::Calibration;
use ringseal::study::measure::H200_FILE;
use ringseal::study::workloads::Workload;

use super::figures::{
    Across, Best, ByMethod, ErrorRow, Figures, MeasuredRow, ModelRow, PER_NODE, SCALE_BYTES,
};

/// The methods of tables.
const METHODS: [&str; 6] = ["plain", "seed", "seed-tree", "ring", "relay", "direct"];
/// Those of the table across GPUs.
const ACROSS: [&str; 8] =
    ["plain", "plain-exchange", "seed", "seed-tree", "ring", "relay", "direct", "exchange"];
/// What stands after figures with keystream ready.
const NOT_COUNTED: &str = "keystream ready, its making not counted";
/// The targets: how much of the published structure's cost is to go, and how slow sealed communication may be.
const TARGET_REDUCTION: f64 = 0.90;
const TARGET_SLOWDOWN: f64 = 1.25;

/// What the command prints.
pub(super) fn summary(figures: &Figures) -> String {
    let mut text = String::new();
    match &figures.machine {
        Some(machine) => {
            line(&mut text, &format!("measured: one iteration's all-reduces, all ranks on one {machine}"));
            text += &measured_table(&figures.measured, &METHODS);
        }
        None => line(&mut text, "nothing measured (--backend cuda, or --measured FILE)"),
    }
    if let Some(across) = &figures.across {
        line(&mut text, &format!("measured: the same with a GPU for each rank, {}", across.machine));
        text += &measured_table(&across.measured, &ACROSS);
    }
    line(&mut text, "modelled: the same over NVLink, communication over the plain ring's");
    text += &modelled_table(figures, |row| &row.slowdown);
    text
}

/// docs/study.md.
pub(super) fn markdown(figures: &Figures, calibration: &Calibration) -> String {
    let mut text = introduction(calibration);
    if figures.machine.is_none() {
        text +=
            "**Nothing in this copy was measured**: it was made without a GPU and without `--measured`.\n\n";
    }
    text += "## Beside the paper's figures\n\n";
    text += &paper(figures);
    text += "\n## Targets\n\n";
    text += &targets(figures, calibration);
    if let Some(machine) = &figures.machine {
        let _ = write!(text, "\n## Measured\n\nAll ranks on one {machine}. {MEASURED}{EIGHT}\n\n");
        text += &measured_table(&figures.measured, &METHODS);
        text += "\n![Measured slowdown by model](study/slowdown-measured.svg)\n";
        text += &missing(&figures.missing);
    }
    if let Some(across) = &figures.across {
        text += &measured_across(across);
    }
    let _ = write!(text, "\n## The model\n\n{MODEL}\n\nIts figures: {}\n\n", calibration.source);
    text += &rates(calibration);
    if !figures.errors.is_empty() {
        text += "\nThe model's time over the measured one, less one, from 1 MiB to 256 MiB on one GPU:\n\n";
        text += &error_table(&figures.errors);
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
        line(&mut text, &format!("| {} |{}", row.ranks, cells(&METHODS, &row.us, |us| format!("{us:.0}"))));
    }
    text += "\n![Cost against ranks](study/cost-against-ranks.svg)\n";
    text += EXPORT;
    text
}

fn introduction(calibration: &Calibration) -> String {
    let figures = match calibration.direct {
        None => "direct, and relay among more than two ranks, are modelled with the ring kernel's figures",
        Some(_) => "relay is modelled with the ring kernel's figures, direct with those of its own",
    };
    format!(
        "# What sealing costs the training of six models

This page is made by one command. On a GPU host, which measures first:

```
ringseal study --backend cuda --measured benches/results/study.json --out docs
```

`--devices 0,1` measures with a rank on each of these GPUs too; with `--merge` only that, beside what the file holds already.
Without a GPU, from the measurements and the calibration that are checked in:

```
ringseal study --measured {H200_FILE} --out docs
```

**Measured** always means: run for real. All ranks are on one GPU, so that the link between them is the GPU's memory, unless
it says that each has its own.
**Modelled** means computed from the equations in `study::model`, with figures fitted to measurements. No training was run,
and {figures}, keystream that is ready with the ring's
and without a cipher. All numbers are in `study/study.json`.

| method | what it is |
|---|---|
| plain | ringseal's ring, nothing sealed: what every cost is counted from, wherever the ranks are |
| seed | the structure of arXiv 2501.11771: a kernel each for encrypt, MAC, copy, check, decrypt and add, at every hop; AES-128, \
         `SeedOptions`' number of chains |
| seed-tree | the same as a binary tree |
| ring, relay, direct, exchange | ringseal's sealed algorithms, one persistent kernel a rank, AES-128; exchange where each of two ranks \
         has a GPU |
| keystream ready | the relay ring, or the exchange of two GPUs, whose keystream was made before: the time that its making takes \
         is **not** in these figures, wherever they stand. A GPU that waits, or computes what leaves room, has it (ADR 9, \
         [timeline.md](timeline.md)); another pays for AES as the other columns say |

Security cost = T(method) - T(plain). Reduction = 1 - cost(best of ringseal) / cost(seed). Best is the fastest without keystream
made ahead; with it there are columns of their own.

"
    )
}

const MEASURED: &str = "Milliseconds of one iteration's all-reduces, f32, DDP's default cap, back to back; median of 3. \
                        Launches of all ranks come from one thread, which is what seed's small messages wait for";

const EIGHT: &str =
    "; among 8 ranks its buckets of 25 MiB do too, so that its cost there is partly that thread's.";

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
fn cells(methods: &[&str], values: &ByMethod, show: impl Fn(f64) -> String) -> String {
    methods.iter().fold(String::new(), |row, name| {
        row + &values.get(*name).map_or_else(|| "  |".into(), |value| format!(" {} |", show(*value)))
    })
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// Nothing costs less than nothing: then how much faster it was stands in brackets.
fn cost(best: &Best) -> String {
    if best.cost_us > 0.0 {
        format!("{:.2}", best.cost_us / 1e3)
    } else {
        format!("none ({:+.0} %)", 100.0 * best.share)
    }
}

/// Of seed's cost no more than all can go.
fn reduction(best: &Best) -> String {
    percent(best.reduction.min(1.0))
}

fn measured_table(rows: &[MeasuredRow], methods: &[&str]) -> String {
    let mut columns = methods.to_vec();
    columns.extend(["best", "its cost", "seed's cost", "reduction"]);
    let ready = rows.iter().any(|row| row.ready.is_some());
    if ready {
        columns.extend([NOT_COUNTED, "its cost", "reduction"]);
    }
    let mut text = heading("model, ranks", &columns);
    for row in rows {
        let best = row.best.as_ref().map_or_else(
            || " | | | |".into(),
            |best| {
                let (cost, seed) = (cost(best), best.seed_cost_us / 1e3);
                format!(" {} | {cost} | {seed:.2} | {} |", best.method, reduction(best))
            },
        );
        let cells = cells(methods, &row.us, |us| format!("{:.2}", us / 1e3));
        let with_keystream = match &row.ready {
            Some(best) => {
                let ms = row.us.get(&best.method).map_or(f64::NAN, |us| us / 1e3);
                format!(" {ms:.2} | {} | {} |", cost(best), reduction(best))
            }
            None if ready => " | | |".into(),
            None => String::new(),
        };
        line(&mut text, &format!("| {}, {} |{cells}{best}{with_keystream}", row.workload, row.ranks));
    }
    text
}

fn missing(what: &[String]) -> String {
    if what.is_empty() {
        return String::new();
    }
    let list: String = what.iter().map(|what| format!("* {what}\n")).collect();
    format!("\nNot measured, and why:\n\n{list}")
}

fn error_table(rows: &[ErrorRow]) -> String {
    let mut text = heading("what", &["measurements", "median of magnitudes", "worst"]);
    for row in rows {
        let (median, worst) = (100.0 * row.median, 100.0 * row.worst);
        line(&mut text, &format!("| {} | {} | {median:.1} % | {worst:+.1} % |", row.what, row.count));
    }
    text
}

fn measured_across(across: &Across) -> String {
    let mut numbers: Vec<_> = across.measured.iter().map(|row| row.ranks).collect();
    numbers.dedup();
    let title = match numbers[..] {
        [] => return String::new(),
        [2] => "Measured across two GPUs".into(),
        _ => format!("Measured across {} GPUs", list(&numbers)),
    };
    let mut text = format!(
        "\n## {title}\n\nA rank on each {}, over NVLink. {MEASURED}. Keystream that is ready is the exchange's of two ranks, the \
         relay ring's of more, and its making is not counted; what stands under *best* makes its own.\n\n",
        across.machine
    );
    text += &measured_table(&across.measured, &ACROSS);
    text += &missing(&across.missing);
    if !across.errors.is_empty() {
        text += "\nThe model's time over the measured one, less one, from 1 MiB to 256 MiB across GPUs. The model is fitted to the \
                 rings, relay rings and direct among these, sealed as they go or plain; of all others it is a prediction, by the \
                 figures of the ring's kernels and of what was measured on one GPU:\n\n";
        text += &error_table(&across.errors);
    }
    text
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ")
}

fn modelled_table(figures: &Figures, of: impl Fn(&ModelRow) -> &ByMethod) -> String {
    let mut columns = METHODS[1..].to_vec();
    let ready = format!("relay, {NOT_COUNTED}");
    columns.extend(["reduction of communication's cost", ready.as_str(), "reduction"]);
    let mut text = heading("model, ranks", &columns);
    for row in &figures.modelled {
        let ratios = of(row);
        let cells = cells(&METHODS[1..], ratios, |ratio| format!("{ratio:.2}"));
        let best = row
            .best
            .as_ref()
            .map_or_else(String::new, |best| format!("{}, {}", best.method, reduction(best)));
        let ready = ratios.get("relay-ready").map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let without = row.ready.as_ref().map_or_else(String::new, reduction);
        line(
            &mut text,
            &format!("| {}, {} |{cells} {best} | {ready} | {without} |", row.workload, row.ranks),
        );
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
    let Calibration { memory_gb_s, nvlink, network, aes_128, aes_256, direct, seed, .. } = calibration;
    let mut text = heading("figure", &["value"]);
    let mut row = |name: &str, value: String| line(&mut text, &format!("| {name} | {value} |"));
    row("memory", format!("{memory_gb_s} GB/s"));
    row("NVLink, a direction", format!("{} GB/s, {} us a hop", nvlink.gb_s, nvlink.hop_us));
    row("network, a GPU (assumed)", format!("{} GB/s, {} us a hop", network.gb_s, network.hop_us));
    let rings = [("in the ring, AES-128", aes_128), ("in the ring, AES-256", aes_256)];
    let direct = direct.iter().map(|direct| ("directly, AES-128", &direct.aes_128));
    for (name, kernel) in rings.into_iter().chain(direct) {
        let rate = kernel.crypt_gb_s.unwrap_or_default();
        let gpu = rate * f64::from(calibration.multiprocessors);
        row(
            &format!("sealing or opening {name}"),
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

fn targets(figures: &Figures, calibration: &Calibration) -> String {
    let mut text = String::new();
    line(
        &mut text,
        &format!(
            "* Security cost at least 90 % below seed's, n = 4, all ranks on one GPU, measured: {}. {ONE_GPU}{}",
            reductions(&figures.measured, 4),
            cipher_alone(&figures.measured, 4)
        ),
    );
    match &figures.across {
        None => line(&mut text, "* The same with a GPU for each rank: not measured here."),
        Some(across) => {
            let mut numbers: Vec<_> = across.measured.iter().map(|row| row.ranks).collect();
            numbers.dedup();
            for ranks in numbers {
                line(
                    &mut text,
                    &format!(
                        "* The same across {}, n = {ranks}, measured: {}.",
                        if ranks == 2 { "two GPUs".into() } else { format!("{ranks} GPUs") },
                        reductions(&across.measured, ranks)
                    ),
                );
            }
        }
    }
    let rows = || figures.modelled.iter().filter(|row| row.ranks == 4);
    let fastest = |row: &ModelRow| {
        let names = ["ring", "relay", "direct"].iter();
        names.filter_map(|name| row.slowdown.get(*name)).copied().reduce(f64::min)
    };
    let slowdowns = |ratios: Vec<f64>| {
        // Three digits: two would show a ratio just beyond the target as the target.
        range(&ratios).map_or_else(
            || "not modelled here".into(),
            |[least, most]| format!("{least:.3}x to {most:.3}x, {}", verdict(most <= TARGET_SLOWDOWN)),
        )
    };
    line(
        &mut text,
        &format!(
            "* Communication at most 1.25x plain, modelled at NVLink 4's rates, n = 4, best algorithm: {}; relay with {NOT_COUNTED}: \
             {}. {} predicted by the ring kernels' figures; how far off that is where it was measured is below.",
            slowdowns(rows().filter_map(fastest).collect()),
            slowdowns(rows().filter_map(|row| row.slowdown.get("relay-ready").copied()).collect()),
            if calibration.direct.is_some() { "What is ready is" } else { "Direct, and what is ready, are" }
        ),
    );
    if let Some(all) = figures.errors.iter().find(|row| row.what == "all") {
        line(
            &mut text,
            &format!(
                "* The model's error at most 15 % in the median, 1 MiB to 256 MiB: {:.1} %, {}.",
                100.0 * all.median,
                verdict(all.median <= 0.15)
            ),
        );
    }
    text
}

/// What keeps the reduction on one GPU from its target. By the schedule's loads and stores; a test counts them.
const ONE_GPU: &str = "What limits it there: the GPU's memory is the link, so that plain ranks move data at memory speed \
                       while all ranks' cryptography shares the one GPU. With keystream ready there is no cipher, but \
                       pads are read from the memory that is the link: a rank of four moves 30 quarters of a vector \
                       where plain moves 20, so by bytes alone it takes 1.5 times plain's time. And seed's kernels here are \
                       fast (the table of figures below).";

/// The most of AES-128's key stream that an H200 can make, by its shared memory (docs/benchmarks.md, CTR's limit), in GB/s.
const CIPHER_LIMIT: f64 = 970.0;

/// How long AES takes in the model for which that leaves least of what the target allows, were there nothing else to do: each rank
/// seals and opens chunks as the relay ring's schedule says, which are the vector's n-th parts, and all share one GPU.
fn cipher_alone(rows: &[MeasuredRow], ranks: usize) -> String {
    let chunks = Schedule::new(Collective::AllReduce, Algorithm::RelayRing, ranks).operations(0).total();
    let bounds = rows.iter().filter(|row| row.ranks == ranks).filter_map(|row| {
        let bytes = 4 * Workload::by_name(&row.workload)?.parameters();
        let cipher_us = (chunks * bytes) as f64 / (1e3 * CIPHER_LIMIT);
        let allowed_us = row.us.get("plain")? + (1.0 - TARGET_REDUCTION) * row.best.as_ref()?.seed_cost_us;
        Some((&row.workload, cipher_us, allowed_us))
    });
    let Some((name, cipher_us, allowed_us)) = bounds.max_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)))
    else {
        return String::new();
    };
    format!(
        " AES alone, at the {CIPHER_LIMIT} GB/s that this GPU's shared memory allows, with its tags, loads and stores for nothing, takes \
         {:.1} ms of {name}'s iteration, of which the target leaves {:.1} for everything.",
        cipher_us / 1e3,
        allowed_us / 1e3
    )
}

/// The reductions of all models without and with keystream made ahead.
fn reductions(rows: &[MeasuredRow], ranks: usize) -> String {
    let of = |which: fn(&MeasuredRow) -> &Option<Best>| {
        let rows = rows.iter().filter(|row| row.ranks == ranks);
        let reductions: Vec<_> =
            rows.filter_map(|row| which(row).as_ref()).map(|best| best.reduction).collect();
        range(&reductions).map(|[least, most]| {
            let [low, high] = [least, most].map(|reduction| percent(reduction.min(1.0)));
            format!("{low} to {high}, {}", verdict(least >= TARGET_REDUCTION))
        })
    };
    match (of(|row| &row.best), of(|row| &row.ready)) {
        (None, _) => "not measured here".into(),
        (Some(best), None) => format!("{best}; with keystream ready: not measured here"),
        (Some(best), Some(ready)) => format!("{best}; with {NOT_COUNTED}: {ready}"),
    }
}

fn range(values: &[f64]) -> Option<[f64; 2]> {
    let least = values.iter().copied().reduce(f64::min)?;
    let most = values.iter().copied().reduce(f64::max)?;
    Some([least, most])
}

const fn verdict(met: bool) -> &'static str {
    if met { "**met**" } else { "**missed**" }
}

#[cfg(test)]
mod tests {
    use ringseal::collective::schedule::{Operand, Outgoing};
    use ringseal::study::fit::{Observation, Protection};
    use ringseal::study::measure::{Iteration, Measured, Origin, measured_h200};

    use super::*;

    /// docs/study.md says what the checked-in measurements and calibration say.
    #[test]
    fn the_document_is_what_the_command_writes() {
        let (measured, calibration) = (measured_h200(), Calibration::h200());
        let figures = Figures::new(&calibration, Some(&measured), 200.0, |_| ()).unwrap();
        let checked_in = include_str!("../../../docs/study.md");
        for (ours, theirs) in markdown(&figures, &calibration).lines().zip(checked_in.lines()) {
            assert_eq!(ours, theirs, "run the command at the top of docs/study.md again");
        }
        assert_eq!(markdown(&figures, &calibration).lines().count(), checked_in.lines().count());
    }

    fn iteration(method: &str, one_gpu: bool, us: f64) -> Iteration {
        let ranks = if one_gpu { 4 } else { 2 };
        let (workload, method) = ("BERT-Base".into(), method.into());
        Iteration { workload, method, one_gpu, ranks, all_reduces: 14, bytes: 1, us }
    }

    /// Made up; the numbers are only to be told apart.
    #[test]
    fn what_was_measured_across_gpus_has_a_section_and_a_target_of_its_own() {
        let calibration = Calibration::h200();
        let one_gpu = [("plain", 1000.0), ("seed", 11_000.0), ("relay", 4000.0), ("relay-ready", 2500.0)];
        let across = [
            ("plain", 2000.0),
            ("plain-exchange", 2100.0),
            ("seed", 6000.0),
            ("exchange", 2600.0),
            ("exchange-ready", 1940.0),
        ];
        let observed = |algorithm: &str, kernels| Observation {
            kernels,
            algorithm: algorithm.into(),
            one_gpu: false,
            ranks: 2,
            bytes: 1 << 20,
            us: 20.0,
            longest_record: None,
        };
        let measured = Measured {
            machine: "A GPU".into(),
            driver: "CUDA 1".into(),
            ringseal: "1".into(),
            across: Some(Origin { driver: "CUDA 2".into(), ringseal: "1".into() }),
            observations: vec![
                observed("ring", Protection::Plain),
                observed("exchange", Protection::Aes128Ready),
                observed("ring", Protection::Seed),
            ],
            iterations: [
                one_gpu.map(|(method, us)| iteration(method, true, us)).to_vec(),
                across.map(|(method, us)| iteration(method, false, us)).to_vec(),
            ]
            .concat(),
            missing: vec!["4 ranks, tree: no".into(), "2 GPUs, tree: not there".into()],
        };
        let figures = Figures::new(&calibration, Some(&measured), 200.0, |_| ()).unwrap();
        let text = markdown(&figures, &calibration);
        let [_, rest] = text.split("\n## Measured across two GPUs\n").collect::<Vec<_>>()[..] else {
            panic!("one such section")
        };
        let section = rest.split("\n## ").next().unwrap();
        for expected in [
            "A rank on each A GPU, CUDA 2",
            "| BERT-Base, 2 | 2.00 | 2.10 | 6.00 |  |  |  |  | 2.60 | exchange | 0.60 | 4.00 | 85 % | 1.94 | none (-3 %) | 100 % |",
            "* 2 GPUs, tree: not there",
            "| exchange, sealed, AES-128, keystream ready | 1 |",
            "| ring, seed | 1 |",
            "its making is not counted",
        ] {
            assert!(section.contains(expected), "{expected}\n{section}");
        }
        assert!(!section.contains("4 ranks, tree"));
        for expected in [
            "n = 4, all ranks on one GPU, measured: 70 % to 70 %, **missed**; with keystream ready, its making not counted: 85 % \
             to 85 %, **missed**.",
            "across two GPUs, n = 2, measured: 85 % to 85 %, **missed**; with keystream ready, its making not counted: 100 % to \
             100 %, **met**.",
            "| BERT-Base, 4 | 1.00 | 11.00 |  |  | 4.00 |  | relay | 3.00 | 10.00 | 70 % | 2.50 | 1.50 | 85 % |",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        assert!(summary(&figures).contains("the same with a GPU for each rank, A GPU, CUDA 2"));
    }

    /// As the text on one GPU says.
    #[test]
    fn pads_make_a_relay_ring_of_four_move_half_as_much_again() {
        let schedule = Schedule::new(Collective::AllReduce, Algorithm::RelayRing, 4);
        let (mut moved, mut pads) = (0, 0);
        for step in &schedule.programs[0] {
            moved += step.operands.len() + usize::from(step.store) + step.outgoing.peers().len();
            pads += step.operands.iter().filter(|operand| **operand != Operand::Local).count();
            pads += usize::from(matches!(step.outgoing, Outgoing::Seal(_)));
        }
        assert_eq!((moved, moved + pads), (20, 30));
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
            across: None,
            modelled: Vec::new(),
            caps: Vec::new(),
            scale: Vec::new(),
        };
        let text = markdown(&figures, &calibration);
        assert!(text.contains("Nothing in this copy was measured") && text.contains("not measured here"));
        assert!(!text.contains("## Measured") && !text.contains("**met**"));
        assert!(summary(&figures).contains("nothing measured"));
    }
}
