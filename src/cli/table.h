// Text in aligned columns.
#pragma once

#include <string>
#include <vector>

namespace fovea::cli {

class Table {
 public:
  enum class Align { kLeft, kRight };

  void add_column(std::string title, Align align);
  void add_row(std::vector<std::string> cells);  // as many as there are columns
  bool empty() const { return rows_.empty(); }
  std::string text() const;

 private:
  std::vector<std::string> titles_;
  std::vector<Align> aligns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string format(const char* pattern, double value);  // printf's, for one number
std::string format_ms(double ms);                       // four significant digits

}  // namespace fovea::cli
