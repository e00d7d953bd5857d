//! `docs/performance.svg`: the ratios in the tables of `docs/performance.md`, one dot per
//! processor.
//!
//! The picture is drawn here, and a stale one fails the test. A table is recognised by its columns
//! `model`, `phase` (or `what`) and `ratio`, a processor by the heading above. Knows no numbers.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::fmt::Write;
use std::path::Path;

/// Processors: the headings of their tables, and colours that colour-blind readers can distinguish.
const PROCESSORS: [(&str, &str); 2] = [("Zen 4", "#0072b2"), ("Zen 5", "#e69f00")];

/// Height of a row, width of the labels and of the axis, height of the header, in pixels.
const ROW: f64 = 17.0;
const LABELS: f64 = 300.0;
const AXIS: f64 = 560.0;
const HEADER: f64 = 58.0;
/// Ratios at the ends of the logarithmic axis, and those with a grid line.
const MIN_RATIO: f64 = 0.65;
const MAX_RATIO: f64 = 12.0;
const GRID: [f64; 9] = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];

/// A case and its ratio on each processor.
struct Row {
    group: String,
    label: String,
    ratios: [Option<f64>; PROCESSORS.len()],
}

/// Group and label of a case.
fn names(model: &str, phase: &str) -> (String, String) {
    match phase.strip_prefix("16 sequences") {
        Some(rest) => {
            let label = rest.trim_start_matches([':', ' ']).to_owned();
            (format!("16 sequences, {model}"), label)
        }
        None => {
            let group = phase.replace(", s", "").replace(", MB", "");
            (group, model.to_owned())
        }
    }
}

/// All rows of all tables, groups in the order of their first rows.
fn parse(page: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![];
    let (mut processor, mut ratio_column) = (None, None);
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            processor = PROCESSORS.iter().position(|(name, _)| *name == heading);
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if cells.get(1) == Some(&"model") {
            ratio_column = cells.iter().position(|cell| *cell == "ratio");
            continue;
        }
        let (Some(processor), Some(column)) = (processor, ratio_column) else {
            continue;
        };
        let Some(Ok(ratio)) = cells.get(column).map(|cell| cell.parse::<f64>()) else {
            ratio_column = ratio_column.filter(|_| line.starts_with("| ---"));
            continue;
        };
        let (group, label) = names(cells[1], cells[2]);
        let is_same = |row: &Row| row.group == group && row.label == label;
        let at = rows.iter().position(is_same).unwrap_or_else(|| {
            let ratios = [None; PROCESSORS.len()];
            rows.push(Row {
                group,
                label,
                ratios,
            });
            rows.len() - 1
        });
        rows[at].ratios[processor] = Some(ratio);
    }
    let groups: Vec<String> = rows.iter().map(|row| row.group.clone()).collect();
    rows.sort_by_key(|row| groups.iter().position(|group| *group == row.group));
    rows
}

fn x_of(ratio: f64) -> f64 {
    LABELS + AXIS * (ratio / MIN_RATIO).ln() / (MAX_RATIO / MIN_RATIO).ln()
}

/// An SVG document under construction.
#[derive(Default)]
struct Svg(String);

impl Svg {
    fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        writeln!(
            self.0,
            r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{text}</text>"#
        )
        .unwrap();
    }

    fn line(&mut self, from: [f64; 2], to: [f64; 2], colour: &str) {
        let ([x1, y1], [x2, y2]) = (from, to);
        writeln!(
            self.0,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{colour}"/>"#
        )
        .unwrap();
    }

    fn dot(&mut self, x: f64, y: f64, colour: &str, title: &str) {
        writeln!(
            self.0,
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" fill="{colour}"><title>{title}</title></circle>"#
        )
        .unwrap();
    }

    /// Title, grid and legend.
    fn header(&mut self, bottom: f64) {
        let bold = r#"font-size="15" font-weight="bold""#;
        let (grey, centred) = (r##"fill="#555""##, r##"text-anchor="middle" fill="#555""##);
        self.text(14.0, 24.0, bold, "Cellar against llama.cpp");
        let axis = "ratio of speeds (of time and memory: inverted); further right is better";
        self.text(LABELS, 24.0, grey, axis);
        for ratio in GRID {
            let (x, top) = (x_of(ratio), HEADER - 12.0);
            let is_peer = ratio == 1.0;
            let colour = if is_peer { "#333" } else { "#ddd" };
            self.line([x, top], [x, bottom], colour);
            let label = if is_peer {
                "llama.cpp".to_owned()
            } else {
                ratio.to_string()
            };
            self.text(x, top - 4.0, centred, &label);
        }
        for (i, (name, colour)) in PROCESSORS.iter().enumerate() {
            let x = 14.0 + 70.0 * i as f64;
            self.dot(x + 5.0, 41.0, colour, name);
            self.text(x + 14.0, 45.0, "", name);
        }
    }

    fn row(&mut self, row: &Row, y: f64) {
        self.text(LABELS - 40.0, y + 4.0, r#"text-anchor="end""#, &row.label);
        let furthest = row.ratios.iter().flatten().copied().fold(1.0, f64::max);
        self.line([x_of(1.0), y], [x_of(furthest), y], "#bbb");
        for (ratio, (_, colour)) in row.ratios.iter().zip(PROCESSORS) {
            if let Some(ratio) = ratio {
                self.dot(x_of(*ratio), y, colour, &ratio.to_string());
            }
        }
    }
}

fn draw(rows: &[Row]) -> String {
    let mut body = Svg::default();
    let (mut y, mut group) = (HEADER, "");
    for row in rows {
        if row.group != group {
            group = &row.group;
            y += ROW;
            body.text(14.0, y + 4.0, r#"font-weight="bold""#, group);
            y += ROW;
        }
        body.row(row, y);
        y += ROW;
    }
    let mut header = Svg::default();
    header.header(y);
    let (width, height) = (LABELS + AXIS + 20.0, y + 8.0);
    let style = r##"font-family="sans-serif" font-size="12" fill="#222""##;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>
<rect width="{width}" height="{height}" fill="#fff"/>
{}{}</svg>
"##,
        header.0, body.0
    )
}

#[test]
fn the_picture_shows_the_tables() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let page = std::fs::read_to_string(docs.join("performance.md")).unwrap();
    let rows = parse(&page);
    for (i, (name, _)) in PROCESSORS.iter().enumerate() {
        let n = rows.iter().filter(|row| row.ratios[i].is_some()).count();
        assert!(n > 20, "{n} ratios of {name}");
    }
    for ratio in rows.iter().flat_map(|row| row.ratios).flatten() {
        assert!(
            MIN_RATIO < ratio && ratio < MAX_RATIO,
            "{ratio} is beyond the axis"
        );
    }
    let (picture, path) = (draw(&rows), docs.join("performance.svg"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &picture).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap_or_default() == picture,
        "docs/performance.svg is stale: UPDATE_DOCS=1 cargo test -p cellar-benches --test performance_picture"
    );
}

#[test]
fn only_tables_of_a_processor_with_ratios_are_read() {
    let page = "# Ratios
| model | phase | ratio |
| --- | --- | --- |
| a | prompt | 9 |

## Zen 5
prose | with | lines

| model | phase | x | ratio | n |
| --- | --- | --- | --- | --- |
| a | prompt | 1 | 2.50 | 3 |
| b | 16 sequences: prompt | 1 | 3.00 | 3 |

| format | y | z | 1.00 |

## Zen 4
| model | what | ratio |
| --- | --- | --- |
| a | prompt | 1.25 |
";
    let rows = parse(page);
    let found: Vec<_> = rows
        .iter()
        .map(|row| (row.group.as_str(), row.label.as_str(), row.ratios))
        .collect();
    assert_eq!(
        found,
        [
            ("prompt", "a", [Some(1.25), Some(2.5)]),
            ("16 sequences, b", "prompt", [None, Some(3.0)]),
        ]
    );
}
