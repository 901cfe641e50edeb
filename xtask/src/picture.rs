//! Draws docs/run.svg: a terminal with a real run of the binary in it.
//!
//! The text is what the binary wrote, wrapped at the width of the drawing; nothing is made up.

use anyhow::{Context, Result};

use crate::args::Args;
use crate::shell;

const QUESTION: &str = "Why do transformers cache keys and values?";
/// Columns of the drawn terminal.
const COLUMNS: usize = 92;
/// Size of a cell of a 14 px monospaced font.
const CELL: (f32, f32) = (8.43, 20.0);
const MARGIN: f32 = 18.0;
/// Height of the bar with the three dots.
const BAR: f32 = 34.0;

/// A line of the terminal and how it is drawn.
struct Row {
    style: &'static str,
    text: String,
}

/// The chore.
pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let nuthatch = shell::release_binary()?;
    let mut command = shell::command(&nuthatch);
    command.args(["run", QUESTION, "--greedy", "--max-tokens", "120", "--stats"]);
    let output = shell::output(&mut command)?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut rows = vec![Row {
        style: "prompt",
        text: format!("$ cargo run --release -- run \"{QUESTION}\" --greedy --max-tokens 120"),
    }];
    add(&mut rows, "answer", &String::from_utf8_lossy(&output.stdout));
    add(&mut rows, "note", &String::from_utf8_lossy(&output.stderr));
    let path = shell::root().join("docs").join("run.svg");
    std::fs::write(&path, draw(&rows)).with_context(|| path.display().to_string())?;
    println!("{} rows drawn to docs/run.svg", rows.len());
    Ok(())
}

fn add(rows: &mut Vec<Row>, style: &'static str, text: &str) {
    // A progress bar redraws its line after a carriage return; the last state is what stays.
    for line in text.trim().lines() {
        let line = line.rsplit('\r').next().unwrap_or_default();
        rows.extend(wrap(&plain(line)).into_iter().map(|text| Row { style, text }));
    }
}

/// The line without terminal escapes.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut symbols = line.chars();
    while let Some(symbol) = symbols.next() {
        if symbol == '\u{1b}' {
            symbols.by_ref().skip(1).find(char::is_ascii_alphabetic);
        } else if !symbol.is_control() {
            text.push(symbol);
        }
    }
    text
}

/// Breaks at spaces, at most `COLUMNS` wide.
fn wrap(line: &str) -> Vec<String> {
    let mut rows = vec![String::new()];
    for word in line.split(' ') {
        let row = rows.last_mut().expect("there is always a row");
        let width = row.chars().count() + 1 + word.chars().count();
        if row.is_empty() {
            row.push_str(word);
        } else if width <= COLUMNS {
            row.push(' ');
            row.push_str(word);
        } else {
            rows.push(word.to_owned());
        }
    }
    rows
}

fn draw(rows: &[Row]) -> String {
    let width = COLUMNS as f32 * CELL.0 + 2.0 * MARGIN;
    let height = BAR + rows.len() as f32 * CELL.1 + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         width=\"{width:.0}\" role=\"img\" aria-label=\"nuthatch answering a question\">\n\
         <style>text{{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:#d6deeb}}\
         .prompt{{fill:#7fdbca}}.note{{fill:#8091a7}}</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0f1b2a\"/>\n"
    );
    for (at, colour) in ["#ff5f57", "#febc2e", "#28c840"].iter().enumerate() {
        let x = MARGIN + at as f32 * 18.0;
        svg.push_str(&format!("<circle cx=\"{x:.0}\" cy=\"17\" r=\"5.5\" fill=\"{colour}\"/>\n"));
    }
    for (at, row) in rows.iter().enumerate() {
        let y = BAR + (at as f32 + 0.75) * CELL.1;
        let text = escape(&row.text);
        svg.push_str(&format!(
            "<text class=\"{}\" x=\"{MARGIN}\" y=\"{y:.0}\">{text}</text>\n",
            row.style
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_plain_wrapped_and_escaped() {
        assert_eq!(plain("\u{1b}[1;32mdone\u{1b}[0m \u{7}ok"), "done ok");
        let rows = wrap(&"word ".repeat(40));
        assert!(rows.len() > 1);
        assert!(rows.iter().all(|row| row.chars().count() <= COLUMNS));
        let svg = draw(&[Row { style: "answer", text: "a < b & c".to_owned() }]);
        assert!(svg.contains("a &lt; b &amp; c"));
    }
}
