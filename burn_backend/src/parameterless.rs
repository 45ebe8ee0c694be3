//! Modules without parameters, which Burn's traversals carry along but do not see.

use burn_core::module::{Content, ModuleVisitor};
use burn_core::tensor::Device;

/// Behavior that differs between such modules.
pub(crate) trait Parameterless: Sized {
    /// Called when a traversal visits the module.
    fn pass<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    /// Returns the module for `device`, in data-parallel training.
    fn forked(self, _device: &Device) -> Self {
        self
    }

    /// Returns the display of the module.
    fn show(&self, content: Content) -> Option<Content>;
}

/// Implements Burn's module traits for `$module`, a [`Parameterless`] type.
macro_rules! parameterless_module {
    ($module:ty) => {
        impl burn_core::module::Module for $module {
            fn visit<V: burn_core::module::ModuleVisitor>(&self, visitor: &mut V) {
                crate::parameterless::Parameterless::pass(self, visitor);
            }

            fn map<M: burn_core::module::ModuleMapper>(self, _mapper: &mut M) -> Self {
                self
            }

            fn to_device(self, _device: &burn_core::tensor::Device) -> Self {
                self
            }

            fn fork(self, device: &burn_core::tensor::Device) -> Self {
                crate::parameterless::Parameterless::forked(self, device)
            }

            fn collect_devices(
                &self,
                devices: burn_core::module::Devices,
            ) -> burn_core::module::Devices {
                devices
            }

            fn materialize(self) -> Self {
                self
            }

            fn valid(&self) -> Self {
                self.clone()
            }

            fn train(self) -> Self {
                self
            }
        }

        impl burn_core::module::ModuleDisplayDefault for $module {
            fn content(
                &self,
                content: burn_core::module::Content,
            ) -> Option<burn_core::module::Content> {
                crate::parameterless::Parameterless::show(self, content)
            }
        }

        impl burn_core::module::ModuleDisplay for $module {}
    };
}
pub(crate) use parameterless_module;
