//! A picture of all heads: how important, and how similar from token to token.

use std::fmt::Write as _;

use nuthatch_engine::topk::Profile;

const CELL: usize = 16;
const LEFT: usize = 48;
const TOP: usize = 56;
const GAP: usize = 60;

/// An SVG of two panels, a row for each layer and a column for each query head.
pub(super) fn draw(profile: &Profile) -> String {
    let (n_layers, n_heads) = (profile.n_layers as usize, profile.n_heads as usize);
    let panel_width = n_heads * CELL;
    let (width, height) = (2 * LEFT + 2 * panel_width + GAP, TOP + n_layers * CELL + 24);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\" fill=\"#6b7280\">\n"
    );
    let panels = [("importance", &profile.importance), ("similarity", &profile.similarity)];
    for (i, (title, values)) in panels.into_iter().enumerate() {
        let left = LEFT + i * (panel_width + GAP);
        // Writing to a string does not fail.
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"20\" font-size=\"13\">{title}</text>");
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"{}\">query head</text>", TOP - 8);
        for layer in 0..n_layers {
            let y = TOP + layer * CELL;
            if layer % 5 == 0 {
                let (x, y) = (left - 6, y + 12);
                let _ =
                    writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{layer}</text>");
            }
            for head in 0..n_heads {
                let Some(&value) = values.get(layer * n_heads + head) else { continue };
                let x = left + head * CELL;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{CELL}\" height=\"{CELL}\" fill=\"{}\">\
                     <title>layer {layer}, head {head}: {value:.3}</title></rect>",
                    colour(value)
                );
            }
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// From light yellow (0 and below) over green to dark blue (1).
fn colour(value: f32) -> String {
    const STOPS: [[f32; 3]; 4] =
        [[255.0, 255.0, 217.0], [127.0, 205.0, 187.0], [29.0, 145.0, 192.0], [8.0, 29.0, 88.0]];
    let place = value.clamp(0.0, 1.0) * (STOPS.len() - 1) as f32;
    let i = (place as usize).min(STOPS.len() - 2);
    let share = place - i as f32;
    let [r, g, b] =
        [0, 1, 2].map(|c| (STOPS[i][c] + (STOPS[i + 1][c] - STOPS[i][c]) * share).round() as u8);
    format!("#{r:02x}{g:02x}{b:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_has_its_cell() {
        let profile = Profile {
            n_layers: 2,
            n_heads: 3,
            importance: vec![0.0, 0.5, 1.0, 2.0, -1.0, 0.1],
            ..Profile::default()
        };
        let svg = draw(&profile);
        assert_eq!(svg.matches("<rect").count(), 6);
        assert!(svg.contains("layer 1, head 2: 0.100"));
        assert_eq!((colour(0.0), colour(1.0)), ("#ffffd9".to_owned(), "#081d58".to_owned()));
        assert_eq!(colour(7.0), colour(1.0));
    }
}
