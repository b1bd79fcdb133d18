// Reusable memory of one thread. It grows on demand, is aligned for vectors, and is not
// initialised.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    T* of(int64_t size) {
        const int64_t bytes = (size * (int64_t)sizeof(T) + 63) / 64 * 64;
        if (bytes > bytes_) {
            std::free(data_);
            data_ = (T*)std::aligned_alloc(64, bytes);
            if (!data_) throw std::bad_alloc();
            bytes_ = bytes;
        }
        return data_;
    }

    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    int64_t bytes_ = 0;
};
