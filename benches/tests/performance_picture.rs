//! `docs/performance.svg`: the ratios of the tables of `docs/performance.md`, one dot for each processor.
//!
//! The picture is drawn here and fails this test when it is stale. It knows a table by its columns `model`, `phase` (or
//! `what`) and `ratio`, and a processor by the heading above.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::fmt::Write;
use std::path::Path;

/// Processors: the headings of their tables, and colours that are told apart without seeing red.
const PROCESSORS: [(&str, &str); 2] = [("Zen 4", "#0072b2"), ("Zen 5", "#e69f00")];

/// Pixels from one row to the next, left of the dots, of all dots, and above the first row.
const ROW: f64 = 17.0;
const LABELS: f64 = 300.0;
const WIDTH: f64 = 560.0;
const TOP: f64 = 58.0;
/// Ratios at the ends of the axis, which is logarithmic, and those that have a line.
const AXIS: (f64, f64) = (0.65, 12.0);
const LINES: [f64; 9] = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];

/// What was measured, and its ratio on each processor.
struct Row {
    group: String,
    label: String,
    ratios: [Option<f64>; PROCESSORS.len()],
}

/// What rows stand under, and what one is called.
fn names(model: &str, phase: &str) -> (String, String) {
    match phase.strip_prefix("16 sequences") {
        Some(rest) => {
            let rest = rest.trim_start_matches([':', ' ']).to_owned();
            (format!("16 sequences, {model}"), rest)
        }
        None => {
            let phase = phase.replace(", s", "").replace(", MB", "");
            (phase, model.to_owned())
        }
    }
}

/// All rows of all tables, in the order of groups' first rows.
fn rows_of(page: &str) -> Vec<Row> {
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
        let known = rows
            .iter_mut()
            .find(|row| row.group == group && row.label == label);
        match known {
            Some(row) => row.ratios[processor] = Some(ratio),
            None => {
                let mut ratios = [None; PROCESSORS.len()];
                ratios[processor] = Some(ratio);
                rows.push(Row {
                    group,
                    label,
                    ratios,
                });
            }
        }
    }
    let groups: Vec<String> = rows.iter().map(|row| row.group.clone()).collect();
    rows.sort_by_key(|row| groups.iter().position(|group| *group == row.group));
    rows
}

fn x_of(ratio: f64) -> f64 {
    let (low, high) = AXIS;
    LABELS + WIDTH * (ratio / low).ln() / (high / low).ln()
}

fn text(svg: &mut String, (x, y): (f64, f64), attributes: &str, text: &str) {
    writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{text}</text>"#
    )
    .unwrap();
}

/// The ratios' lines, what the dots mean, and where the other program stands.
fn draw_axis(svg: &mut String, bottom: f64) {
    text(
        svg,
        (14.0, 24.0),
        r#"font-size="15" font-weight="bold""#,
        "Cellar beside llama.cpp",
    );
    let says = "times as fast (times as little: memory, first token); further right is better";
    text(svg, (LABELS, 24.0), r##"fill="#555""##, says);
    for ratio in LINES {
        let (x, is_peer) = (x_of(ratio), ratio == 1.0);
        let colour = if is_peer { "#333" } else { "#ddd" };
        let top = TOP - 12.0;
        writeln!(
            svg,
            r#"<line x1="{x:.1}" y1="{top}" x2="{x:.1}" y2="{bottom}" stroke="{colour}"/>"#
        )
        .unwrap();
        let said = if is_peer {
            "llama.cpp".to_owned()
        } else {
            ratio.to_string()
        };
        text(
            svg,
            (x, top - 4.0),
            r##"text-anchor="middle" fill="#555""##,
            &said,
        );
    }
    for (i, (name, colour)) in PROCESSORS.iter().enumerate() {
        let x = 14.0 + 70.0 * i as f64;
        writeln!(
            svg,
            r#"<circle cx="{:.1}" cy="41" r="4.5" fill="{colour}"/>"#,
            x + 5.0
        )
        .unwrap();
        text(svg, (x + 14.0, 45.0), "", name);
    }
}

fn draw_row(svg: &mut String, row: &Row, y: f64) {
    text(
        svg,
        (LABELS - 40.0, y + 4.0),
        r#"text-anchor="end""#,
        &row.label,
    );
    let furthest = row.ratios.iter().flatten().copied().fold(1.0, f64::max);
    writeln!(
        svg,
        r##"<line x1="{:.1}" y1="{y:.1}" x2="{:.1}" y2="{y:.1}" stroke="#bbb"/>"##,
        x_of(1.0),
        x_of(furthest)
    )
    .unwrap();
    for (ratio, (_, colour)) in row.ratios.iter().zip(PROCESSORS) {
        if let Some(ratio) = ratio {
            let x = x_of(*ratio);
            writeln!(
                svg,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" fill="{colour}"><title>{ratio}</title></circle>"#
            )
            .unwrap();
        }
    }
}

fn draw(rows: &[Row]) -> String {
    let mut body = String::new();
    let (mut y, mut group) = (TOP, "");
    for row in rows {
        if row.group != group {
            group = &row.group;
            y += ROW;
            text(&mut body, (14.0, y + 4.0), r#"font-weight="bold""#, group);
            y += ROW;
        }
        draw_row(&mut body, row, y);
        y += ROW;
    }
    let (width, height) = (LABELS + WIDTH + 20.0, y + 8.0);
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222">
<rect width="{width}" height="{height}" fill="#fff"/>
"##
    );
    draw_axis(&mut svg, y);
    svg + &body + "</svg>\n"
}

#[test]
fn the_picture_shows_the_tables() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let page = std::fs::read_to_string(docs.join("performance.md")).unwrap();
    let rows = rows_of(&page);
    for (i, (name, _)) in PROCESSORS.iter().enumerate() {
        let n = rows.iter().filter(|row| row.ratios[i].is_some()).count();
        assert!(n > 20, "{n} ratios of {name}");
    }
    for ratio in rows.iter().flat_map(|row| row.ratios).flatten() {
        assert!(
            AXIS.0 < ratio && ratio < AXIS.1,
            "{ratio} is beyond the axis"
        );
    }
    let (picture, path) = (draw(&rows), docs.join("performance.svg"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &picture).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == picture,
        "docs/performance.svg is stale: UPDATE_DOCS=1 cargo test -p cellar-benches --test performance_picture"
    );
}

#[test]
fn tables_are_told_from_other_text() {
    let page = "# Ratios\n| model | phase | ratio |\n| --- | --- | --- |\n| a | prompt | 9 |\n\n## Zen 5\nprose | with | lines\n
| model | phase | x | ratio | n |\n| --- | --- | --- | --- | --- |\n| a | prompt | 1 | 2.50 | 3 |\n| b | 16 sequences: prompt | 1 | 3.00 | 3 |\n
| format | y | z | 1.00 |\n\n## Zen 4\n| model | what | ratio |\n| --- | --- | --- |\n| a | prompt | 1.25 |\n";
    let rows = rows_of(page);
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
