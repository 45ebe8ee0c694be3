//! Block scales of packed weights, row-major or in 128x4 tiles.
//!
//! Backend-independent operations convert between the two layouts, once when a layer is created,
//! loaded or saved.

use burn_core::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn_core::tensor::{DType, Device, Int, Tensor};
use nvfp4_formats::StoredForm;

/// Block scales of a packed weight, E4M3 bytes, in the layout that the GEMMs of its layer read.
///
/// Burn's traversals, and so records, see one parameter, always row-major, `u8[n, k / 16]`.
/// Therefore the module is not derived: a parameter's mappers cannot change its shape.
#[derive(Clone, Debug)]
pub struct BlockScales {
    scales: Param<Tensor<2, Int>>,
    /// Matrices that the scales belong to, if the layout is tiled.
    tiled: Option<Matrices>,
}

impl BlockScales {
    /// Creates scales in row-major layout.
    pub(super) fn new(rows: Tensor<2, Int>) -> Self {
        Self {
            scales: Param::initialized(ParamId::new(), rows),
            tiled: None,
        }
    }

    /// Returns the form of a packed weight with these scales: in rows or in 128x4 tiles.
    pub fn form(&self) -> StoredForm {
        match self.tiled {
            None => StoredForm::Rows,
            Some(_) => StoredForm::Tiles,
        }
    }

    /// Returns the bytes in memory order: `u8[n, k / 16]` if row-major. In 128x4 tiles, each matrix
    /// begins a new tile, with rows padded to a multiple of 128 and blocks to a multiple of 4.
    pub fn val(&self) -> Tensor<2, Int> {
        self.scales.val()
    }

    /// Returns the bytes in row-major layout.
    pub fn in_rows(&self) -> Tensor<2, Int> {
        match self.tiled {
            None => self.val(),
            Some(matrices) => matrices.in_rows(self.val()),
        }
    }

    /// Converts the scales of these `matrices` to tiles or to rows.
    pub(super) fn in_form(self, form: StoredForm, matrices: Matrices) -> Self {
        match (form.has_tiles(), self.tiled) {
            (false, None) | (true, Some(_)) => self,
            (false, Some(_)) => Self {
                scales: self.parameter(),
                tiled: None,
            },
            (true, None) => Self::tiled(self.scales, matrices),
        }
    }

    /// Converts row-major scales to tiles.
    fn tiled(rows: Param<Tensor<2, Int>>, matrices: Matrices) -> Self {
        Self {
            scales: Param::initialized(rows.id, matrices.in_tiles(rows.val())),
            tiled: Some(matrices),
        }
    }

    /// Returns the parameter that traversals see.
    fn parameter(&self) -> Param<Tensor<2, Int>> {
        match self.tiled {
            None => self.scales.clone(),
            Some(_) => Param::initialized(self.scales.id, self.in_rows()),
        }
    }
}

impl Module for BlockScales {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.visit_int(&self.parameter());
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let mapped = mapper.map_int(self.parameter());
        match self.tiled {
            None => Self {
                scales: mapped,
                tiled: None,
            },
            Some(matrices) => Self::tiled(mapped, matrices),
        }
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            scales: self.scales.to_device(device),
            ..self
        }
    }

    fn fork(self, device: &Device) -> Self {
        Self {
            scales: self.scales.fork(device),
            ..self
        }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.scales.collect_devices(devices)
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        Self {
            scales: self.scales.valid(),
            tiled: self.tiled,
        }
    }

    fn train(self) -> Self {
        Self {
            scales: self.scales.train(),
            ..self
        }
    }
}

impl ModuleDisplayDefault for BlockScales {
    fn content(&self, content: Content) -> Option<Content> {
        let [rows, blocks] = self.scales.lazy_shape().dims();
        content
            .add_formatted(&format!("u8[{rows}, {blocks}] {:?}", self.form()))
            .optional()
    }
}

impl ModuleDisplay for BlockScales {}

/// Shape of the matrices that block scales belong to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrices {
    /// Number of matrices.
    pub(super) count: usize,
    /// Rows per matrix.
    pub(super) rows: usize,
    /// Blocks per row.
    pub(super) blocks: usize,
}

impl Matrices {
    /// Number of tiles along the rows and along the blocks of a matrix.
    fn tiles(&self) -> (usize, usize) {
        (self.rows.div_ceil(128), self.blocks.div_ceil(4))
    }

    /// Converts `scales` to tiles. Each matrix begins a new tile; padding is zero.
    pub(super) fn in_tiles(&self, scales: Tensor<2, Int>) -> Tensor<2, Int> {
        let (down, across) = self.tiles();
        let (rows, blocks) = (128 * down, 4 * across);
        let scales = scales.reshape([self.count, self.rows, self.blocks]);
        let scales = padded(scales, 1, rows);
        let scales = padded(scales, 2, blocks);
        // A tile is 32 lines of four rows, 32 apart, with four blocks each.
        let parts = scales.reshape([self.count * down, 4, 32, across, 4]);
        let tiles = parts.permute([0, 3, 2, 1, 4]);
        tiles.reshape([self.count * rows, blocks])
    }

    /// Converts `scales` from tiles to row-major layout.
    pub(super) fn in_rows(&self, scales: Tensor<2, Int>) -> Tensor<2, Int> {
        let (down, across) = self.tiles();
        let tiles = scales.reshape([self.count * down, across, 32, 4, 4]);
        let rows = tiles.permute([0, 3, 2, 1, 4]);
        let rows = rows.reshape([self.count, 128 * down, 4 * across]);
        let own = rows.slice([0..self.count, 0..self.rows, 0..self.blocks]);
        own.reshape([self.count * self.rows, self.blocks])
    }
}

/// Pads `x` with zeros along `dim` to `len`.
fn padded(x: Tensor<3, Int>, dim: usize, len: usize) -> Tensor<3, Int> {
    let mut dims = x.dims();
    if dims[dim] == len {
        return x;
    }
    dims[dim] = len - dims[dim];
    let zeros = Tensor::zeros(dims, (&x.device(), DType::U8));
    Tensor::cat(vec![x, zeros], dim)
}
