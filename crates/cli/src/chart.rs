//! Line charts as SVG: axes, grid, legend, and colours for light and dark pages.
//!
//! ```text
//!   +-- title ----------------------- legend --+
//!   |  panel        panel        panel         |
//!   |  y |  ___     y |   __     y |           |
//!   |    |_/___       |__/__       |_____      |
//!   |      x            x            x         |
//!   +------------------------------------------+
//! ```
//!
//! Text is drawn by whoever shows the picture, so no font is needed here. The same data give the
//! same bytes.

use std::fmt::Write as _;

/// A figure of one or more panels with common axes.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    /// Name and colour of what is drawn in all panels.
    pub(crate) legend: Vec<(String, Colour)>,
    pub(crate) panels: Vec<Panel>,
}

/// What an axis shows.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    /// The numbers at both ends; data beyond are cut off.
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// How numbers become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    /// Powers of ten are evenly spaced; both ends are positive.
    Log,
}

/// One of a few colours that can be told apart, also by those who see few colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colour(pub(crate) usize);

impl Colour {
    /// The classes of a line: when all colours are taken, they come again dashed, then dotted.
    fn class(self) -> String {
        let dashes = ["", " dashed", " dotted"][(self.0 / COLOURS.len()).min(2)];
        format!("c{}{dashes}", self.0 % COLOURS.len())
    }
}

/// A chart inside a figure.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    /// Empty for none.
    pub(crate) title: String,
    pub(crate) lines: Vec<Line>,
}

/// A curve.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) colour: Colour,
    /// In order of x.
    pub(crate) points: Vec<(f64, f64)>,
    /// Whether the curve goes in steps: level until the next point.
    pub(crate) is_stepped: bool,
}

/// Okabe and Ito's colours, for light and for dark pages.
const COLOURS: [(&str, &str); 6] = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0894a"),
    ("#009e73", "#2fc79b"),
    ("#a8578a", "#dd9cc4"),
    ("#b8860b", "#e6b93a"),
    ("#6b7280", "#9ca3af"),
];

const WIDTH: f64 = 860.0;
/// The title's height, and that of a line of the legend.
const HEAD: f64 = 42.0;
const LEGEND_LINE: f64 = 18.0;
const PANEL_HEIGHT: f64 = 250.0;
const N_COLUMNS: usize = 3;
/// Room around a panel for its numbers and labels.
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;
/// About the width of a letter of the legend.
const LETTER: f64 = 7.0;

/// A rectangle in which one panel's data lie.
#[derive(Clone, Copy, Debug)]
struct Frame {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Figure {
    /// The figure as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let n_columns = self.panels.len().clamp(1, N_COLUMNS);
        let n_rows = self.panels.len().div_ceil(n_columns).max(1);
        // One chart alone is higher.
        let panel_height = if self.panels.len() == 1 { 1.4 * PANEL_HEIGHT } else { PANEL_HEIGHT };
        let legend = self.legend_places();
        let head = legend.last().map_or(HEAD, |&(_, y)| y + LEGEND_LINE - 4.0);
        let height = head + panel_height * n_rows as f64 + 8.0;
        let mut out = String::new();
        self.push_head(&mut out, height, &legend);
        let width = WIDTH / n_columns as f64;
        for (i, panel) in self.panels.iter().enumerate() {
            let (column, row) = (i % n_columns, i / n_columns);
            let frame = Frame {
                left: column as f64 * width + LEFT,
                top: head + row as f64 * panel_height + TOP,
                width: width - LEFT - RIGHT,
                height: panel_height - TOP - BOTTOM,
            };
            self.push_panel(&mut out, panel, frame);
        }
        out.push_str("</svg>\n");
        out
    }

    /// Where each name of the legend begins: beside the one before, or below where it has no room.
    fn legend_places(&self) -> Vec<(f64, f64)> {
        let (mut x, mut y) = (20.0, HEAD + 4.0);
        let mut places = Vec::new();
        for (name, _) in &self.legend {
            let width = 28.0 + LETTER * name.chars().count() as f64;
            if x > 20.0 && x + width > WIDTH {
                (x, y) = (20.0, y + LEGEND_LINE);
            }
            places.push((x, y));
            x += width + 20.0;
        }
        places
    }

    fn push_head(&self, out: &mut String, height: f64, legend: &[(f64, f64)]) {
        push(
            out,
            format_args!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\" role=\"img\" font-family=\"system-ui, \
             -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n<title>{}</title>\n",
                escape(&self.title)
            ),
        );
        // Many small panels need finer lines.
        push_style(out, if self.panels.len() > 1 { 1.4 } else { 2.0 });
        push(
            out,
            format_args!(
                "<rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
             <text class=\"title\" x=\"20\" y=\"26\">{}</text>\n",
                escape(&self.title)
            ),
        );
        for ((name, colour), &(x, y)) in self.legend.iter().zip(legend) {
            push(
                out,
                format_args!(
                    "<line class=\"{}\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
                    colour.class(),
                    x + 22.0,
                    x + 28.0,
                    y + 4.0,
                    escape(name)
                ),
            );
        }
    }

    fn push_panel(&self, out: &mut String, panel: &Panel, frame: Frame) {
        let Frame { left, top, width, height } = frame;
        let (right, bottom) = (left + width, top + height);
        if !panel.title.is_empty() {
            push(
                out,
                format_args!(
                    "<text class=\"name\" x=\"{left:.1}\" y=\"{:.1}\">{}</text>\n",
                    top - 8.0,
                    escape(&panel.title)
                ),
            );
        }
        for tick in self.y.ticks(4) {
            let y = bottom - height * self.y.place(tick);
            push(
                out,
                format_args!(
                    "<line class=\"grid\" x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" \
                 y2=\"{y:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>\n",
                    left - 6.0,
                    y + 4.0,
                    number(tick)
                ),
            );
        }
        for tick in self.x.ticks((width / 70.0) as usize) {
            let x = left + width * self.x.place(tick);
            push(
                out,
                format_args!(
                    "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" \
                 y2=\"{bottom:.1}\"/><text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" \
                 text-anchor=\"middle\">{}</text>\n",
                    bottom + 16.0,
                    number(tick)
                ),
            );
        }
        push(
            out,
            format_args!(
                "<path class=\"axis\" d=\"M{left:.1} {top:.1}V{bottom:.1}H{right:.1}\"/>\n\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text class=\"tick\" transform=\"translate({:.1} {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>\n",
                left + width / 2.0,
                bottom + 36.0,
                escape(&self.x.label),
                left - 44.0,
                top + height / 2.0,
                escape(&self.y.label)
            ),
        );
        for line in &panel.lines {
            self.push_line(out, line, frame);
        }
    }

    fn push_line(&self, out: &mut String, line: &Line, frame: Frame) {
        let Frame { left, top, width, height } = frame;
        let place = |&(x, y): &(f64, f64)| {
            let (x, y) = (self.x.place(x), self.y.place(y));
            (left + width * x, top + height - height * y)
        };
        let mut points = line.points.iter().map(place);
        let Some((x, y)) = points.next() else { return };
        push(out, format_args!("<path class=\"{}\" d=\"M{x:.1} {y:.1}", line.colour.class()));
        for (x, y) in points {
            if line.is_stepped {
                push(out, format_args!("H{x:.1}V{y:.1}"));
            } else {
                push(out, format_args!("L{x:.1} {y:.1}"));
            }
        }
        out.push_str("\"/>\n");
    }
}

/// The rules for colours and sizes; the picture follows the page between light and dark.
fn push_style(out: &mut String, line_width: f64) {
    out.push_str(
        "<style>\ntext{font-size:12.5px;fill:#374151}.title{font-size:16px;font-weight:600;\
         fill:#111827}.name{font-weight:600}.tick{font-size:11.5px;fill:#6b7280}\
         .page{fill:#ffffff}.grid{stroke:#e5e7eb;stroke-width:1}\
         .axis{stroke:#9ca3af;stroke-width:1;fill:none}\n\
         .dashed{stroke-dasharray:6 3}.dotted{stroke-dasharray:2 2}\n",
    );
    for (i, (light, _)) in COLOURS.iter().enumerate() {
        push(
            out,
            format_args!(
                ".c{i}{{stroke:{light};stroke-width:{line_width};fill:none;stroke-linejoin:round}}\n"
            ),
        );
    }
    out.push_str(
        "@media(prefers-color-scheme:dark){text{fill:#d1d5db}.title{fill:#f3f4f6}\
         .tick{fill:#9ca3af}.page{fill:#0d1117}.grid{stroke:#262c36}.axis{stroke:#6b7280}\n",
    );
    for (i, (_, dark)) in COLOURS.iter().enumerate() {
        push(out, format_args!(".c{i}{{stroke:{dark}}}\n"));
    }
    out.push_str("}</style>\n");
}

/// Writing to a string cannot fail.
fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

impl Axis {
    /// An even axis from 0 to a round number above `max`.
    pub(crate) fn from_zero(label: &str, max: f64) -> Self {
        let step = nice_step(max.max(f64::MIN_POSITIVE), 4);
        let max = (max / step).ceil().max(1.0) * step;
        Axis { label: label.to_owned(), scale: Scale::Linear, min: 0.0, max }
    }

    /// Where a number lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (value - self.min) / (self.max - self.min),
            Scale::Log => (value / self.min).ln() / (self.max / self.min).ln(),
        };
        // What is no number, such as the logarithm of a negative one, lies at the begin.
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }

    /// About `n` round numbers between the ends.
    fn ticks(&self, n: usize) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = nice_step(self.max - self.min, n.max(1));
                let first = (self.min / step).ceil() as i64;
                let last = (self.max / step + 1e-9).floor() as i64;
                (first..=last).map(|i| i as f64 * step).collect()
            }
            Scale::Log => {
                let (first, last) =
                    (self.min.log10().floor() as i32, self.max.log10().ceil() as i32);
                let inside = |value: &f64| {
                    *value >= self.min * (1.0 - 1e-9) && *value <= self.max * (1.0 + 1e-9)
                };
                let tens: Vec<f64> =
                    (first..=last).map(|power| 10f64.powi(power)).filter(inside).collect();
                if tens.len() > 1 {
                    return tens;
                }
                // Too short an axis for powers of ten has powers of two.
                let (first, last) = (self.min.log2().floor() as i32, self.max.log2().ceil() as i32);
                (first..=last).map(|power| 2f64.powi(power)).filter(inside).collect()
            }
        }
    }
}

/// A step of 1, 2 or 5 times a power of ten that cuts `range` into about `n` parts.
fn nice_step(range: f64, n: usize) -> f64 {
    let rough = range / n as f64;
    let power = 10f64.powf(rough.log10().floor());
    let digit = rough / power;
    let nice = if digit < 1.5 {
        1.0
    } else if digit < 3.5 {
        2.0
    } else if digit < 7.5 {
        5.0
    } else {
        10.0
    };
    nice * power
}

/// A number without needless digits.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        let axis = |scale, min, max| Axis { label: String::new(), scale, min, max };
        assert_eq!(
            axis(Scale::Linear, 0.0, 1.0).ticks(4),
            [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
        );
        assert_eq!(
            axis(Scale::Linear, 0.0, 600.0).ticks(6),
            [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
        );
        assert_eq!(axis(Scale::Log, 0.01, 100.0).ticks(9), [0.01, 0.1, 1.0, 10.0, 100.0]);
        assert_eq!(axis(Scale::Log, 2000.0, 8192.0).ticks(9), [2048.0, 4096.0, 8192.0]);
        assert_eq!(Axis::from_zero("", 93.0).max, 100.0);
        assert_eq!([0.0, 0.5, 1200.0, 0.1 + 0.2].map(number), ["0", "0.5", "1200", "0.3"]);
    }

    #[test]
    fn places_are_inside_whatever_the_number() {
        let log = Axis { label: String::new(), scale: Scale::Log, min: 0.1, max: 10.0 };
        assert_eq!(log.place(1.0), 0.5);
        for value in [f64::NAN, -1.0, 0.0, f64::INFINITY, 1e9] {
            assert!((0.0..=1.0).contains(&log.place(value)), "{value}");
        }
    }

    #[test]
    fn a_figure_is_well_formed_and_always_the_same() {
        let line = |is_stepped| Line {
            colour: Colour(9),
            points: vec![(0.0, 0.0), (5.0, 1.0)],
            is_stepped,
        };
        let panel = Panel { title: "a < b & c".to_owned(), lines: vec![line(true), line(false)] };
        let figure = Figure {
            title: "T".to_owned(),
            x: Axis::from_zero("x", 10.0),
            y: Axis::from_zero("y", 1.0),
            legend: (0..14).map(|i| (format!("the line number {i}"), Colour(i))).collect(),
            panels: vec![panel; 4],
        };
        let widest = figure.legend_places().into_iter().map(|(x, _)| x).fold(0.0, f64::max);
        assert!(widest < WIDTH - 100.0, "a name outside the picture");
        let svg = figure.svg();
        assert_eq!(svg, figure.svg());
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains("H") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
