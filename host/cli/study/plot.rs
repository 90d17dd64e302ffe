//! The study's plots, as SVG.

use std::collections::BTreeMap;

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::super::failure::{Failure, Outcome};
use super::figures::{ByMethod, Figures};

const SIZE: (u32, u32) = (860, 460);
/// Distinguishable in print and by colour-blind readers (Okabe and Ito, 2008).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 0, 0),
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];
/// Methods in the order of their colours.
const METHODS: [&str; 7] = ["plain", "seed", "seed-tree", "ring", "relay", "direct", "relay-ready"];

/// A named line of points.
type Line = (String, Vec<(f64, f64)>);

/// Each plot's file name and text.
pub(super) fn all(figures: &Figures) -> Outcome<Vec<(&'static str, String)>> {
    let models: Vec<&str> = figures.operations.iter().map(|row| row.workload).collect();
    let place = |workload: &str| models.iter().position(|model| *model == workload).unwrap_or(0) as f64;
    let by_model = by_method(
        figures.modelled.iter().filter(|row| row.ranks == 4).map(|row| (place(row.workload), &row.slowdown)),
    );
    let mut plots = vec![(
        "slowdown-by-model.svg",
        categories("Communication over plain, 4 ranks, NVLink (modelled)", "slowdown", &models, &by_model)?,
    )];
    if figures.measured.iter().any(|row| row.ranks == 4) {
        let rows = figures.measured.iter().filter(|row| row.ranks == 4);
        let ratios: Vec<(f64, ByMethod)> = rows
            .map(|row| {
                let plain = row.us.get("plain").copied().unwrap_or(f64::NAN);
                let over = row.us.iter().map(|(name, us)| (name.clone(), us / plain)).collect();
                (place(&row.workload), over)
            })
            .collect();
        let lines = by_method(ratios.iter().map(|(at, over)| (*at, over)));
        let title = "Communication over plain, 4 ranks on one GPU (measured)";
        plots.push(("slowdown-measured.svg", categories(title, "slowdown", &models, &lines)?));
    }
    for (name, method) in [("cap-seed.svg", "seed"), ("cap-ring.svg", "ring"), ("cap-relay.svg", "relay")] {
        let lines: Vec<Line> = models
            .iter()
            .map(|model| {
                let rows = figures.caps.iter().filter(|row| row.workload == *model);
                let points = rows
                    .filter_map(|row| row.slowdown.get(method).map(|ratio| (row.cap_mib as f64, *ratio)))
                    .collect();
                ((*model).to_owned(), points)
            })
            .collect();
        if lines.iter().any(|line| !line.1.is_empty()) {
            let title = format!("{method}: communication over plain, 4 ranks, NVLink (modelled)");
            plots.push((name, log_log(&title, "bucket_cap_mb", "slowdown", &lines)?));
        }
    }
    let counts = |name: &str, of: &dyn Fn(&super::figures::Operations) -> f64| -> Line {
        (name.into(), figures.operations.iter().map(|row| (place(row.workload), of(row))).collect())
    };
    let lines = [
        counts("ring operations a rank, n = 4", &|row| row.ring.get(&4).map_or(0.0, |count| *count as f64)),
        counts("relay or direct", &|row| row.fewest.get(&4).map_or(0.0, |count| *count as f64)),
        counts("MB a rank", &|row| row.bytes as f64 / 1e6),
    ];
    plots.push((
        "operations.svg",
        categories(
            "Operations and gradients of an iteration at the default cap",
            "count, MB",
            &models,
            &lines,
        )?,
    ));
    let scale = by_method(figures.scale.iter().map(|row| (row.ranks as f64, &row.us)));
    let title = "All-reduce of 64 MiB, nodes of 8 (modelled)";
    plots.push(("cost-against-ranks.svg", log_log(title, "ranks", "time, us", &scale)?));
    Ok(plots)
}

/// One line a method, in the order of [`METHODS`].
fn by_method<'a>(points: impl Iterator<Item = (f64, &'a ByMethod)>) -> Vec<Line> {
    let mut lines: BTreeMap<usize, Line> = BTreeMap::new();
    for (x, values) in points {
        for (order, name) in METHODS.into_iter().enumerate() {
            if let Some(value) = values.get(name) {
                lines.entry(order).or_insert_with(|| (name.into(), Vec::new())).1.push((x, *value));
            }
        }
    }
    lines.into_values().collect()
}

/// Points over names on the horizontal axis, logarithmic upwards.
fn categories(title: &str, unit: &str, names: &[&str], lines: &[Line]) -> Outcome<String> {
    let width = names.len() as f64;
    let label = |x: &f64| {
        let near = x.round();
        if (x - near).abs() > 1e-9 || near < 0.0 {
            return String::new();
        }
        names.get(near as usize).copied().unwrap_or_default().to_owned()
    };
    draw(title, "", unit, -0.5..width - 0.5, lines, &label, names.len() * 2 + 1)
}

/// Both axes logarithmic.
fn log_log(title: &str, across: &str, up: &str, lines: &[Line]) -> Outcome<String> {
    let x = || lines.iter().flat_map(|line| line.1.iter().map(|point| point.0));
    let (least, most) = (x().fold(f64::INFINITY, f64::min), x().fold(0.0, f64::max));
    draw(title, across, up, (least..most).log_scale(), lines, &|x| format!("{x}"), 10)
}

fn draw<X>(
    title: &str,
    across: &str,
    up: &str,
    range: X,
    lines: &[Line],
    label: &dyn Fn(&f64) -> String,
    labels: usize,
) -> Outcome<String>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    let fail = |error: &dyn std::fmt::Display| Failure::Input(format!("plot {title:?}: {error}"));
    let y = || lines.iter().flat_map(|line| line.1.iter().map(|point| point.1)).filter(|y| y.is_finite());
    let (least, most) = (y().fold(f64::INFINITY, f64::min), y().fold(0.0, f64::max));
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| fail(&error))?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(range, (least * 0.8..most * 2.5).log_scale())
            .map_err(|error| fail(&error))?;
        chart
            .configure_mesh()
            .x_desc(across)
            .y_desc(up)
            .x_labels(labels)
            .x_label_formatter(&|x| label(x))
            .y_label_formatter(&|y| format!("{y}"))
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(|error| fail(&error))?;
        for ((name, points), colour) in lines.iter().zip(COLOURS) {
            let points = points.iter().copied().filter(|point| point.1.is_finite());
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))
                .map_err(|error| fail(&error))?
                .label(name.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
            .map_err(|error| fail(&error))?;
        root.present().map_err(|error| fail(&error))?;
    }
    Ok(text)
}
