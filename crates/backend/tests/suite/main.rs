//! The conformance suite, judged itself: the plainest device passes, broken ones do not.

mod plain;

use nuthatch_backend::conformance::checks;

use plain::Plain;

#[test]
fn the_plainest_device_passes() {
    for (name, check) in checks::<Plain>() {
        println!("{name}");
        let started = std::time::SystemTime::now();
        check(&Plain);
        println!("{:?}", started.elapsed());
    }
}
