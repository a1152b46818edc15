"""Names and signatures of other libraries, over fovea's engines."""
