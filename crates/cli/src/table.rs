//! Tables of text for people: columns that line up, plain or as Markdown.

/// Where a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table with a header row.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub(crate) fn new<S: Into<String>>(columns: impl IntoIterator<Item = (S, Align)>) -> Self {
        let columns = columns.into_iter().map(|(name, align)| (name.into(), align)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row; a missing cell stays empty, cells beyond the last column are dropped.
    pub(crate) fn push<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }

    /// Columns two spaces apart, each line indented by two, no trailing spaces.
    pub(crate) fn plain(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        let header = self.columns.iter().map(|(name, _)| name.as_str());
        for cells in std::iter::once(header.collect::<Vec<_>>())
            .chain(self.rows.iter().map(|row| row.iter().map(String::as_str).collect()))
        {
            let mut line = String::from(" ");
            for ((cell, width), (_, align)) in cells.iter().zip(&widths).zip(&self.columns) {
                line.push(' ');
                push_aligned(&mut line, cell, *width, *align);
                line.push(' ');
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }

    /// A Markdown table that also lines up as plain text.
    pub(crate) fn markdown(&self) -> String {
        let widths: Vec<usize> = self.widths().iter().map(|&width| width.max(3)).collect();
        let mut out = String::new();
        let header: Vec<&str> = self.columns.iter().map(|(name, _)| name.as_str()).collect();
        self.push_markdown_row(&mut out, &header, &widths);
        for (width, (_, align)) in widths.iter().zip(&self.columns) {
            out.push_str("| ");
            out.push_str(&"-".repeat(width - 1));
            out.push(if *align == Align::Right { ':' } else { '-' });
            out.push(' ');
        }
        out.push_str("|\n");
        for row in &self.rows {
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            self.push_markdown_row(&mut out, &cells, &widths);
        }
        out
    }

    fn push_markdown_row(&self, out: &mut String, cells: &[&str], widths: &[usize]) {
        for ((cell, width), (_, align)) in cells.iter().zip(widths).zip(&self.columns) {
            out.push_str("| ");
            push_aligned(out, cell, *width, *align);
            out.push(' ');
        }
        out.push_str("|\n");
    }

    fn widths(&self) -> Vec<usize> {
        self.columns
            .iter()
            .enumerate()
            .map(|(i, (name, _))| {
                let cells = self.rows.iter().map(|row| row[i].chars().count());
                cells.chain([name.chars().count()]).max().unwrap_or(0)
            })
            .collect()
    }
}

fn push_aligned(line: &mut String, cell: &str, width: usize, align: Align) {
    let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
    match align {
        Align::Left => {
            line.push_str(cell);
            line.push_str(&padding);
        }
        Align::Right => {
            line.push_str(&padding);
            line.push_str(cell);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new([("name", Align::Left), ("t/s", Align::Right)]);
        table.push(["pp512", "870.25"]);
        table.push(["\u{b5}"]);
        table
    }

    #[test]
    fn plain_columns_line_up() {
        assert_eq!(sample().plain(), "  name      t/s\n  pp512  870.25\n  \u{b5}\n");
    }

    #[test]
    fn markdown_is_markdown() {
        let expect =
            "| name  |    t/s |\n| ----- | -----: |\n| pp512 | 870.25 |\n| \u{b5}     |        |\n";
        assert_eq!(sample().markdown(), expect);
    }
}
