//! What a device keeps of pages that are on the host, as a table.

use nuthatch_engine::Sizes;

use crate::size::Bytes;
use crate::table::{Align, Table};

/// The parts of the near budget, what they are together, and the budget; nothing if no page is far.
pub(super) fn near_table(sizes: &Sizes) -> Option<String> {
    let near = sizes.near.as_ref().filter(|_| sizes.host_kv > 0)?;
    let mut table = Table::new([("kept on the device", Align::Left), ("bytes", Align::Right)]);
    let parts = [
        ("what it decides by, working sets".to_owned(), sizes.deciding),
        ("digests".to_owned(), near.digests),
        ("scales of rows in eight bits".to_owned(), near.scales),
        ("rows on their way".to_owned(), near.staged),
        (format!("copies of {} pages", near.n_pages), near.copies),
        (format!("{} whole layers", near.n_layers), near.layers),
        (format!("{} heads in eight bits", near.n_heads), near.heads),
    ];
    for (name, bytes) in parts.into_iter().filter(|(_, bytes)| *bytes > 0) {
        table.push([name, Bytes(bytes).to_string()]);
    }
    let together = sizes.deciding + near.bytes();
    for (name, bytes) in [("together", together), ("at most", near.budget)] {
        table.push([name.to_owned(), Bytes(bytes).to_string()]);
    }
    Some(table.plain())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::tests::far_sizes;

    #[test]
    fn parts_add_up() {
        let far = far_sizes();
        let text = near_table(&far).unwrap();
        assert!(text.contains("copies of 9 pages") && text.contains("3 whole layers"), "{text}");
        assert!(text.contains("2 heads in eight bits"), "{text}");
        let line = |name| text.lines().map(str::trim).find(|line| line.starts_with(name)).unwrap();
        assert!(line("together").ends_with(" 6 B") && line("at most").ends_with(" 9 B"), "{text}");
        assert_eq!(near_table(&Sizes { host_kv: 0, ..far }), None);
        assert_eq!(near_table(&Sizes { near: None, ..far }), None);
    }
}
