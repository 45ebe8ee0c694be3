//! Draws `loss.svg`.

use std::path::Path;

use anyhow::{Context, Result};
use nvfp4_lm::metrics::Row;
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 540);
/// One color per curve. Further curves reuse the colors with hollow dots.
const COLORS: [RGBColor; 16] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 69, 65),
    RGBColor(44, 140, 80),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(90, 90, 90),
    RGBColor(188, 189, 34),
    RGBColor(20, 30, 110),
    RGBColor(124, 214, 60),
    RGBColor(173, 20, 117),
    RGBColor(0, 95, 90),
    RGBColor(250, 160, 140),
    RGBColor(170, 140, 95),
];
const GRAY: RGBColor = RGBColor(110, 110, 110);

/// Draws the losses of each recipe over the steps to `path`: a thin line for training, a thick one
/// with dots for validation, and a level line for the unigram entropy, if any. The losses are in
/// nats per `element`.
pub(crate) fn loss(
    path: &Path,
    curves: &[(&str, &[Row])],
    element: &str,
    unigram: Option<f64>,
) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, curves, element, unigram)
        .map_err(|error| anyhow::anyhow!("{error}"))
        .and_then(|()| std::fs::write(path, &svg).map_err(Into::into))
        .with_context(|| format!("cannot draw {}", path.display()))
}

/// Draws only the validation losses, without the first tenth of the steps, so that the curves can
/// be told apart.
pub(crate) fn validation(path: &Path, curves: &[(&str, &[Row])]) -> Result<()> {
    let late: Vec<(&str, Vec<Row>)> = curves
        .iter()
        .map(|(name, rows)| {
            let last = rows.last().map_or(0, |row| row.step);
            let late = rows.iter().filter(|row| row.step * 10 >= last);
            let late = late.map(|row| Row {
                train_loss: None,
                ..*row
            });
            (*name, late.collect())
        })
        .collect();
    let curves: Vec<(&str, &[Row])> = late.iter().map(|(name, rows)| (*name, &rows[..])).collect();
    loss(path, &curves, "byte", None)
}

/// Returns the color and the dot style of curve number `index`; the first 32 are distinct.
fn style(index: usize) -> (RGBColor, ShapeStyle) {
    let color = COLORS[index % COLORS.len()];
    let dot = match (index / COLORS.len()).is_multiple_of(2) {
        true => color.filled(),
        false => color.stroke_width(1),
    };
    (color, dot)
}

fn draw(
    svg: &mut String,
    curves: &[(&str, &[Row])],
    element: &str,
    unigram: Option<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let rows = || curves.iter().flat_map(|(_, rows)| rows.iter());
    let last = rows().map(|row| row.step).max().unwrap_or(1).max(1);
    let losses: Vec<f64> = rows()
        .flat_map(|row| [row.train_loss, row.valid_loss])
        .flatten()
        .chain(unigram)
        .collect();
    let low = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let high = losses.iter().copied().fold(0.0, f64::max);
    let margin = 0.05 * (high - low).max(1e-3);

    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption("Loss", ("sans-serif", 22))
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0f64..last as f64, (low - margin).max(0.0)..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(format!("nats per {element}"))
        .label_style(("sans-serif", 14))
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .draw()?;
    if let Some(unigram) = unigram {
        chart
            .draw_series(LineSeries::new(
                [(0.0, unigram), (last as f64, unigram)],
                BLACK.stroke_width(2),
            ))?
            .label("unigram entropy")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 22, y)], BLACK.stroke_width(2)));
    }
    for (index, (name, rows)) in curves.iter().enumerate() {
        let (color, dot) = style(index);
        let points = |value: fn(&Row) -> Option<f64>| {
            rows.iter()
                .filter_map(move |row| Some((row.step as f64, value(row)?)))
        };
        if rows.iter().any(|row| row.train_loss.is_some()) {
            let thin = color.mix(0.45).stroke_width(1);
            chart
                .draw_series(LineSeries::new(points(|row| row.train_loss), thin))?
                .label(format!("{name}, training"))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], thin));
        }
        let thick = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points(|row| row.valid_loss), thick))?
            .label(format!("{name}, validation"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], thick));
        chart.draw_series(points(|row| row.valid_loss).map(|point| Circle::new(point, 3, dot)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(14)
        .legend_area_size(30)
        .background_style(WHITE.mix(0.9))
        .border_style(GRAY)
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_can_be_told_apart() {
        let row = |step, loss| Row {
            step,
            tokens: 0,
            train_loss: None,
            valid_loss: Some(loss),
            lr: 0.0,
            tokens_per_s: None,
        };
        let rows = [row(0, 2.0), row(10, 1.0)];
        let names: Vec<String> = (0..20).map(|index| format!("curve {index}")).collect();
        let curves: Vec<(&str, &[Row])> = names
            .iter()
            .map(|name| (name.as_str(), &rows[..]))
            .collect();
        let mut svg = String::new();
        draw(&mut svg, &curves, "token", None).unwrap();
        assert!(svg.contains("nats per token"));
        // Style of a curve: the line, and the dots after it.
        let lines: Vec<&str> = svg.lines().collect();
        let mut looks: Vec<(String, bool)> = lines
            .windows(2)
            .filter(|pair| pair[0].starts_with("<polyline") && pair[1].starts_with("<circle"))
            .map(|pair| {
                let stroke = pair[0].split("stroke=\"").nth(1).unwrap();
                let color = stroke.split('"').next().unwrap();
                (color.to_string(), pair[1].contains("fill=\"none\""))
            })
            .collect();
        assert_eq!(looks.len(), names.len());
        looks.sort();
        looks.dedup();
        assert_eq!(looks.len(), names.len(), "{looks:?}");
    }
}
