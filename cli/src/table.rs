//! Text tables.

/// Aligns the columns of `rows`: a letter `r` in `align` aligns its column to the right, any other
/// to the left.
pub(crate) fn table(align: &str, rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let columns: Vec<(char, usize)> = align.chars().zip((0..).map(width)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&columns).map(|(cell, &(align, width))| {
            if align == 'r' {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        });
        let cells: Vec<String> = cells.collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["name", "bytes"], ["a", "1"], ["longer", "12345678"]];
        let rows = rows.map(|row| row.map(String::from).to_vec());
        let expected = ["name       bytes", "a              1", "longer  12345678"];
        assert_eq!(table("lr", &rows), expected);
    }
}
